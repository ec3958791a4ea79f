"""Entry of every process that the launcher starts: `python -m minisgl.launcher.child NAME CONTROL_FD LAUNCHER_PID`.

What follows are modules to import before the launcher says what to do: a standby waits with them at hand.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from minisgl import logging as log
from minisgl.errors import CodedError
from minisgl.launcher import control

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


class Control:
    """A child's end of the line to its launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._send_lock = threading.Lock()
        self._on_gave_up: Callable[[str], None] | None = None

    def progress(self, text: str) -> None:
        """Say what is being done until `ready`."""
        self._send(control.Progress(text))

    def ready(self, message: control.Ready = control.Ready()) -> None:  # noqa: B008 - it is frozen
        self._send(message)

    def refuse(self, code: str, message: str) -> None:
        self._send(control.Refused(code, message))

    def on_gave_up(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason, on a thread of its own, when the launcher ends everything because of a
        failure. Set it before `ready`: the launcher tells nobody earlier."""
        self._on_gave_up = callback

    def receive_start(self) -> control.Start | None:
        """What to do; None when the launcher has no use for this process."""
        line = self._lines.readline()
        if not line:
            return None
        message = control.to_child.decode(line)
        assert isinstance(message, control.Start)
        return message

    def listen(self) -> None:
        """Follow the launcher's messages on a daemon thread; end this process at once when the launcher is gone."""
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
            # The launcher is gone, and the listening thread ends this process.
            return


def main() -> int:
    name, descriptor, launcher = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _die_with(launcher)
    _set_title(f"minisgl-{name}")
    # A terminal's Ctrl-C is the launcher's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = Control(socket.socket(fileno=descriptor))
    for module in sys.argv[4:]:
        importlib.import_module(module)
    if sys.argv[4:]:
        line.progress(control.STANDING_BY)
    start = line.receive_start()
    if start is None:
        return 0
    _set_title(f"minisgl-{start.name}")
    log.set_up(start.name, cast(log.LogLevel, start.log_level), "json")
    line.listen()
    module, _, function = start.target.partition(":")
    try:
        target: Callable[[msgspec.Raw, Control], None] = getattr(importlib.import_module(module), function)
        target(start.config, line)
    except CodedError as error:
        line.refuse(error.code, str(error))
        return 1
    except Exception as error:
        logger.exception("%s", error)
        return 1
    return 0


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != launcher:
        # It ended before the call above.
        sys.exit(1)


def _set_title(title: str) -> None:
    """The name in `ps -o comm` and `top`; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()))


def _prctl(option: int, argument: Any) -> None:
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, argument, zero, zero, zero)


if __name__ == "__main__":
    sys.exit(main())
