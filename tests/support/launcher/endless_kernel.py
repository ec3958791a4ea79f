"""A kernel that never ends."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _spin(flag: Any) -> None:
    turns = 0
    # Volatile, so that no compiler may assume that the loop ends.
    while tl.load(flag, volatile=True) == 0:
        turns += 1
    tl.store(flag, turns)


def launch() -> None:
    """Queue the kernel on the current stream of the current device."""
    _spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
