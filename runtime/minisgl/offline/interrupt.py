"""Handling of Ctrl-C during a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the calls of the yielded function, which raises KeyboardInterrupt: in the middle of a step it
    would leave scheduler and engine in different states. A second Ctrl-C takes effect immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    arrived = False

    def on_signal(*_: object) -> None:
        nonlocal arrived
        arrived = True
        signal.signal(signal.SIGINT, previous)

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
