"""All-reduce of short messages between the ranks of one machine by `kernels.one_shot_all_reduce_triton`."""

from __future__ import annotations

from typing import Final

import torch

_CAPACITY_BYTES: Final = {2: 8 << 20, 4: 1 << 20}
"""Longest message in bytes, by number of ranks. Each rank writes its message to all others, while NCCL's ring writes
it at most twice: with more ranks NCCL is faster from shorter messages on. More than 4 ranks were never measured and
always use NCCL."""
_ALIGNMENT: Final = 16
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def one_shot_capacity(ranks: int) -> int:
    """Longest message in bytes that `ranks` ranks reduce this way; 0: none."""
    return _CAPACITY_BYTES.get(ranks, 0)


class OneShotAllReduce:
    """One rank's side. `addresses`: int64 [ranks], addresses on this rank of each rank's memory of `memory_bytes`."""

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
        """Sum `tensor` over the ranks in place."""
        from minisgl.kernels.one_shot_all_reduce_triton import one_shot_all_reduce

        one_shot_all_reduce(message, self._addresses, self._turns, self._rank, self._capacity_bytes)
