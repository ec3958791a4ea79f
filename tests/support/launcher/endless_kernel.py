# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A kernel that never ends."""

import torch
import triton
import triton.language as tl


@triton.jit
def _spin(flag):
    turns = 0
    # Volatile, so that no compiler may assume that the loop ends.
    while tl.load(flag, volatile=True) == 0:
        turns += 1
    tl.store(flag, turns)


def launch() -> None:
    """Queue the kernel on the current stream of the current device."""
    _spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
