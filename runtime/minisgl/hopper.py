"""Numbers of Hopper GPUs (H100 and H200), for which kernels and defaults are tuned."""

from __future__ import annotations

from typing import Final

MULTIPROCESSORS: Final = 132
REGISTERS: Final = 1 << 16
"""Registers of a multiprocessor, of 32 bits each."""
SHARED_MEMORY: Final = 227 << 10
"""Bytes of shared memory of a multiprocessor that a program can have."""
