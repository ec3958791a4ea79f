"""What process 1 of a container has to do: pass on signals, and reap orphans."""

from __future__ import annotations

import os
import signal
from typing import Final

_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def become_init() -> None:
    """Go on in a child; this process stays to care for it and ends as it does. Call it before there are threads.

    A launcher that reaped every process that comes to it could not tell its own children's exit codes any more.
    """
    # The kernel drops a signal for which process 1 has no handler: none may come before there is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    launcher = os.fork()
    if launcher:
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: _pass_on(launcher, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if launcher == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == launcher:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _pass_on(launcher: int, number: int) -> None:
    try:
        os.kill(launcher, number)
    except ProcessLookupError:
        # It has just ended, and `wait` will say so.
        return
