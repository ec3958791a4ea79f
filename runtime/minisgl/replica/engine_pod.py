"""`minisgl engine`: process 1 of an engine pod, as the leader of its replica or as one of its member pods."""

from __future__ import annotations

import logging
import os

from minisgl import logging as log
from minisgl.launcher.control_server import ControlServer, StatusBoard
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.signals import Signals
from minisgl.replica.init import run_as_init
from minisgl.replica.leader import Leader
from minisgl.replica.member_pod import MemberPod
from minisgl.replica.options import EngineOptions

logger = logging.getLogger(__name__)


def engine(options: EngineOptions) -> None:
    """Run until SIGINT or SIGTERM, or until the replica has been drained. Raises LauncherError."""
    if os.getpid() == 1:
        run_as_init()
    board, on_line = StatusBoard(), log.writer(options.log.format)
    require = options.secret().require
    with Signals() as signals, ControlServer(options.ports.control, board, signals.request, require):
        if options.pod_index:
            MemberPod(options, signals, board, on_line).run()
        else:
            with run_directory() as sockets:
                Leader(options, signals, board, sockets, on_line).run()
    logger.info("stopped")
