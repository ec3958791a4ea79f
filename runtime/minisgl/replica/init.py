"""Duties of process 1 of a container: forward signals, and reap orphans."""

from __future__ import annotations

import os
import signal
from typing import Final

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_as_init() -> None:
    """Fork, and return in the child; this process stays as its init and exits with it. Call it before there are
    threads.

    A launcher that reaped all orphans could not read the exit codes of its own children any more.
    """
    # The kernel drops a signal for which process 1 has no handler: none may arrive before there is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    launcher = os.fork()
    if launcher:
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: _forward_signal(launcher, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    if launcher == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == launcher:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _forward_signal(launcher: int, number: int) -> None:
    try:
        os.kill(launcher, number)
    except ProcessLookupError:
        # It has just exited, and `wait` returns it next.
        return
