"""`engine`: process 1 of a pod that runs ranks of a replica.

Pod 0's launcher leads (`leader`): it supervises the ranks of all pods, its own as children and the others over links.
The launchers of the other pods (`follower_pod`) start and watch their ranks for it.
"""

from __future__ import annotations

import logging
import os
import sys

from minisgl import logging as log
from minisgl.launcher.control_server import Board, ControlServer
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.signals import Signals
from minisgl.replica.init import become_init
from minisgl.replica.leader import Leader
from minisgl.replica.member_pod import MemberPod
from minisgl.replica.options import EngineOptions

logger = logging.getLogger(__name__)


def engine(options: EngineOptions) -> int:
    """Run until SIGINT or SIGTERM, or until the replica has been drained; the exit code."""
    if os.getpid() == 1:
        become_init()
    log.set_up("launcher", options.log_level, options.log_format)
    renderer = log.Renderer(options.log_format, sys.stderr)

    def on_line(line: log.Line) -> None:
        print(renderer.render(line), file=sys.stderr, flush=True)

    board = Board()
    try:
        with Signals() as signals, ControlServer(options.ports.control, board, signals.request):
            if options.pod_index:
                code = MemberPod(options, signals, board, on_line).run()
            else:
                with run_directory() as sockets:
                    code = Leader(options, signals, board, sockets, on_line).run()
    except LauncherError as error:
        logger.error("%s", error, extra={"code": error.code})
        return 1
    logger.info("stopped")
    return code
