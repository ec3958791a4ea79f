"""All-reduce of short messages between the ranks of one machine by `kernels.one_shot_all_reduce_triton`."""

from __future__ import annotations

from typing import Final

import torch

_CAPACITY_BYTES: Final = {2: 8 << 20, 4: 1 << 20}
"""By ranks. Each rank writes its message to all others, which NCCL's ring does at most twice: with more ranks NCCL is
faster from a shorter message on. More than 4 were never measured nor run: NCCL adds up all of theirs."""
_ALIGNMENT: Final = 16
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def one_shot_capacity(ranks: int) -> int:
    """Bytes of the longest message that so many ranks add up this way; 0: none."""
    return _CAPACITY_BYTES.get(ranks, 0)


class OneShotAllReduce:
    """One rank's side. `addresses`: int64 [ranks], where this rank finds each rank's memory of `memory_bytes`."""

    def __init__(self, rank: int, addresses: torch.Tensor) -> None:
        from minisgl.kernels.one_shot_all_reduce_triton import num_programs

        self._rank = rank
        self._addresses = addresses
        self._capacity_bytes = one_shot_capacity(len(addresses))
        self._turns = torch.zeros(num_programs(self._capacity_bytes), dtype=torch.int32, device=addresses.device)

    def takes(self, message: torch.Tensor) -> bool:
        return (
            0 < message.nbytes <= self._capacity_bytes
            and message.dtype in _DTYPES
            and message.nbytes % _ALIGNMENT == 0
            and message.data_ptr() % _ALIGNMENT == 0
        )

    def sum(self, message: torch.Tensor) -> None:
        """In place."""
        from minisgl.kernels.one_shot_all_reduce_triton import one_shot_all_reduce

        one_shot_all_reduce(message, self._addresses, self._turns, self._rank, self._capacity_bytes)
