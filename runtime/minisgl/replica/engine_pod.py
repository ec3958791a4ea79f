"""`engine`: process 1 of a pod that runs ranks of a replica.

Pod 0's launcher leads (`leader`): it supervises the ranks of all pods, its own as children and the others over links.
The launchers of the other pods (`follower_pod`) start and watch their ranks for it.
"""

from __future__ import annotations

import logging
import os

from minisgl import logging as log
from minisgl.launcher.control_server import Board, ControlServer
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.signals import Signals
from minisgl.replica.init import become_init
from minisgl.replica.leader import Leader
from minisgl.replica.member_pod import MemberPod
from minisgl.replica.options import EngineOptions

logger = logging.getLogger(__name__)


def engine(options: EngineOptions) -> None:
    """Run until SIGINT or SIGTERM, or until the replica has been drained. Raises LauncherError."""
    if os.getpid() == 1:
        become_init()
    board, on_line = Board(), log.writer(options.log.format)
    with Signals() as signals, ControlServer(options.ports.control, board, signals.request):
        if options.pod_index:
            MemberPod(options, signals, board, on_line).run()
        else:
            with run_directory() as sockets:
                Leader(options, signals, board, sockets, on_line).run()
    logger.info("stopped")
