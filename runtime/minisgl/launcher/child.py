"""Entry of every process that the launcher starts: `python -m minisgl.launcher.child NAME CONTROL_FD LAUNCHER_PID`.

Further arguments are modules that a standby imports before the launcher sends its work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import msgspec

from minisgl import logging as log
from minisgl.errors import CodedError, describe
from minisgl.launcher import control
from minisgl.launcher.heartbeat import BusySince, start_heartbeats

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15

_IMPORT_NICENESS: Final = 10
"""Added for the imports of a standby: where cores are short they get a tenth of the share of a process that serves."""


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
    preload = sys.argv[4:]
    _die_with(launcher)
    # A standby has its name once it can take over.
    _set_title(f"importing-{name}" if preload else f"minisgl-{name}")
    # The launcher handles Ctrl-C in a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher asks a hung process for its stacks. The handler needs no interpreter lock.
    faulthandler.register(control.STACKS_SIGNAL)
    channel = Control(socket.socket(fileno=descriptor))
    if preload:
        _import_nicely(preload)
        _set_title(f"minisgl-{name}")
        channel.progress(control.IMPORTED)
    start = channel.receive_start()
    if start is None:
        return 0
    _set_title(f"minisgl-{start.name}")
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


def _import_nicely(modules: Sequence[str]) -> None:
    """Import modules while other processes serve, which need the cores more.

    A thread does it, because Linux counts niceness by thread, and without privileges none can lower its own again: the
    main thread, which serves later, must keep the usual one."""

    def run() -> None:
        os.nice(_IMPORT_NICENESS)
        for module in modules:
            importlib.import_module(module)

    with ThreadPoolExecutor(1, "imports") as pool:
        pool.submit(run).result()


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher exits for any reason."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != launcher:
        # It exited before the call above.
        sys.exit(1)


def _set_title(title: str) -> None:
    """Set the name in `ps -o comm` and `top`, of which the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()))


def _prctl(option: int, argument: Any) -> None:
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, argument, zero, zero, zero)


if __name__ == "__main__":
    exit_code = main()
    if exit_code:
        # Threads of a device that has failed may never end, and the interpreter would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
