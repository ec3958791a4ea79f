"""Entry of every process that the launcher starts: `python -m minisgl.launcher.child NAME CONTROL_FD LAUNCHER_PID`.

Further arguments make it a standby: the niceness of its imports, and the modules for the processes that it forks.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import cast

import msgspec

from minisgl import logging as log
from minisgl.errors import CodedError, describe
from minisgl.launcher import control
from minisgl.launcher.heartbeat import BusySince, start_heartbeats
from minisgl.launcher.prctl import die_with, set_title
from minisgl.launcher.standby import fork_on_request, import_nicely

logger = logging.getLogger(__name__)


class Control:
    """A child's end of the control channel to its launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._send_lock = threading.Lock()
        self._on_gave_up: Callable[[str], None] | None = None
        self._heartbeats = False

    def progress(self, text: str) -> None:
        """Report the current step of the start."""
        self._send(control.Progress(text))

    def ready(self, message: control.Ready = control.Ready()) -> None:  # noqa: B008 - it is frozen
        self._send(message)

    def report_start_error(self, code: str, message: str) -> None:
        self._send(control.StartError(code, message))

    def watch_steps(self, engine: BusySince, *, on_cpu: bool) -> None:
        """Report the age of the current step from now on. Call it before `ready`, on the thread that runs the steps."""
        if self._heartbeats:
            start_heartbeats(engine, lambda age: self._send(control.Heartbeat(age)), on_cpu=on_cpu)

    def on_gave_up(self, callback: Callable[[str], None]) -> None:
        """Set a callback for the moment when the launcher gives up: it is called with the reason, on a thread of its
        own. Set it before `ready`: the launcher sends the message to ready processes only."""
        self._on_gave_up = callback

    def receive_start(self) -> control.Start | None:
        """Wait for the work of this process; None when the launcher has exited."""
        line = self._lines.readline()
        if not line:
            return None
        message = control.to_child.decode(line)
        assert isinstance(message, control.Start)
        self._heartbeats = message.heartbeats
        return message

    def listen(self) -> None:
        """Handle messages of the launcher on a daemon thread, which kills this process when the launcher has exited."""
        threading.Thread(target=self._listen, name="launcher-control", daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            message = control.to_child.decode(line)
            if isinstance(message, control.GaveUp) and self._on_gave_up is not None:
                self._on_gave_up(message.message)
        os._exit(1)

    def _send(self, message: control.FromChild) -> None:
        try:
            with self._send_lock:
                self._connection.sendall(control.encode(message))
        except OSError:
            # The launcher has exited, and the listening thread kills this process.
            return


def main() -> int:
    name, descriptor, launcher = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    imports = sys.argv[4:]
    die_with(launcher)
    # A standby has its name once it can fork.
    set_title(f"importing-{name}" if imports else f"minisgl-{name}")
    # The launcher handles Ctrl-C in a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher asks a hung process for its stacks. The handler needs no interpreter lock.
    faulthandler.register(control.STACKS_SIGNAL)
    connection = socket.socket(fileno=descriptor)
    if not imports:
        return _work(Control(connection))
    import_nicely(int(imports[0]), imports[1:])
    set_title(f"minisgl-{name}")
    forked = fork_on_request(connection)
    if forked is None:
        return 0
    die_with(launcher)
    return _work(Control(forked))


def _work(channel: Control) -> int:
    """Receive the work of this process and do it; returns the exit code."""
    start = channel.receive_start()
    if start is None:
        return 0
    set_title(f"minisgl-{start.name}")
    log.set_up(start.name, cast(log.LogLevel, start.log_level), "json")
    channel.listen()
    module, _, function = start.target.partition(":")
    try:
        target: Callable[[msgspec.Raw, Control], None] = getattr(importlib.import_module(module), function)
        target(start.config, channel)
    except CodedError as error:
        channel.report_start_error(error.code, str(error))
        return 1
    except Exception as error:
        logger.exception("%s", describe(error))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    if exit_code:
        # Threads of a device that has failed may never end, and the interpreter would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
