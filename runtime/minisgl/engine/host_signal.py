"""Waits of CUDA streams for the host, by a function of the driver that torch does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

_REACHED: Final = 0
"""The driver's name is CU_STREAM_WAIT_VALUE_GEQ. Numbers may wrap around: differences of 32 bits count."""
_WRAP: Final = 1 << 32


class HostSignal:
    """A number in pinned memory that the host raises, and for which streams wait.

    Until then, work behind a wait does not begin. A host that waits for the device first would wait for ever.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = self._memory.numpy().view(np.uint32)
        self._wait = _wait_function()
        self.newest = 0
        """Number of the newest wait."""
        if self._wait is not None and self._wait(torch.cuda.current_stream().cuda_stream, self._address, 0, _REACHED):
            self._wait = None

    @property
    def is_supported(self) -> bool:
        """Whether the driver can wait."""
        return self._wait is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a stream waits, or will wait, for a number that is not reached."""
        return int(self._number[0]) != self.newest

    def wait(self) -> int:
        """Let the current stream wait until the number that this returns is reached."""
        assert self._wait is not None
        self.newest = (self.newest + 1) % _WRAP
        error = self._wait(torch.cuda.current_stream().cuda_stream, self._address, self.newest, _REACHED)
        if error:
            raise RuntimeError(f"CUDA driver error {error} in cuStreamWaitValue32; restart the engine")
        return self.newest

    def reach(self, number: int) -> None:
        """End the waits up to this one. Any thread may call it."""
        self._number[0] = number

    @property
    def _address(self) -> int:
        """Address for the device, which is the same as for the host."""
        return self._memory.data_ptr()


def _wait_function() -> Callable[[int, int, int, int], int] | None:
    """Return the driver's function (stream, address, value, flags) → error; None if it has none."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return function
