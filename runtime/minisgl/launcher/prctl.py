"""Calls of Linux's `prctl`: what the kernel does for a process when its relatives exit, and its name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent exits for any reason."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        # It exited before the call above.
        sys.exit(1)


def adopt_descendants(adopt: bool) -> None:
    """Become the parent of descendants of this process whose own parent exits from now on, or leave them to others."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt))


def set_title(title: str) -> None:
    """Set the name in `ps -o comm` and `top`, of which the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()))


def _prctl(option: int, argument: Any) -> None:
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, argument, zero, zero, zero)
