"""Signals as events of a selector."""

from __future__ import annotations

import os
import selectors
import signal
from types import FrameType, TracebackType
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REQUEST: Final = b"\0"


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is open; SIGCHLD only wakes the selector. Handlers just write a byte
    to a pipe that the selector watches. SIGHUP stays ignored if it was, as under nohup. Open it on the main thread."""

    def __init__(self) -> None:
        self.stops = 0
        self.requested = False
        """`request` was called."""

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = {*_STOP_SIGNALS, signal.SIGCHLD} - ({signal.SIGHUP} if outlives_terminal else set())
        self._handlers = {number: signal.signal(number, _ignore) for number in taken}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def request(self) -> None:
        """Request a stop as the first signal does; from any thread."""
        os.write(self._writer, _REQUEST)

    def watch(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._reader, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        numbers = os.read(self._reader, 512)
        self.stops += sum(number in _STOP_SIGNALS for number in numbers)
        self.requested |= _REQUEST in numbers


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the byte in the pipe carries the signal."""
