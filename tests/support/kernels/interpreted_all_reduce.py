"""The one-shot all-reduce on a CPU: ranks are processes that share memory, each in Triton's interpreter:
`python -m support.kernels.interpreted_all_reduce` prints, as JSON, what is wrong with each case (null: nothing).

What it cannot show: the order in which a GPU's writes become visible, and the end of a wait that takes too long.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from unittest import mock

import torch
import triton.language as tl

from minisgl.distributed.one_shot import OneShotAllReduce, one_shot_capacity
from minisgl.kernels import one_shot_all_reduce_triton
from minisgl.kernels.one_shot_all_reduce_triton import memory_bytes

_LENGTHS = (8, 2056, 4104, 40, 2048, 8)
"""Lengths of successive messages: one block, several blocks, and ends within a block."""
_JOIN_SECONDS = 200.0


@dataclass(frozen=True)
class Case:
    """Not in bfloat16, which the interpreter rounds towards zero."""

    ranks: int
    dtype: torch.dtype
    turn: int = 0
    """From which on all programs count."""


CASES = {
    f"{case.ranks} ranks, {case.dtype}, from turn {case.turn} on": case
    for case in (
        Case(2, torch.float32),
        Case(4, torch.float16, 2**31 - 3),
    )
}


def _messages(case: Case) -> list[torch.Tensor]:
    """[ranks, length] each"""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(case.ranks, length, generator=draw).to(case.dtype) for length in _LENGTHS]


def _pause() -> None:
    """Any of the ranks may be the last."""
    if random.random() < 0.2:
        time.sleep(0.002)


def _rank_main(case: Case, rank: int, addresses: torch.Tensor, results: list[torch.Tensor]) -> None:
    random.seed(rank)
    one_shot = OneShotAllReduce(rank, addresses)
    one_shot._turns.fill_(case.turn)
    with (
        mock.patch.object(one_shot_all_reduce_triton, "_fail_when_late", lambda begin: time.sleep(0.001)),
        mock.patch.object(tl.extra.cuda, "globaltimer", lambda: 0),
        mock.patch.object(tl, "debug_barrier", _pause),
    ):
        for parts, result in zip(_messages(case), results, strict=True):
            message = parts[rank].clone()
            assert one_shot.takes(message)
            one_shot.sum(message)
            result[rank] = message


def what_is_wrong(case: Case) -> str | None:
    memory = torch.zeros(case.ranks, memory_bytes(one_shot_capacity(case.ranks), case.ranks), dtype=torch.uint8)
    memory.view(torch.int32).fill_(case.turn)
    memory.share_memory_()
    addresses = torch.tensor([part.data_ptr() for part in memory])
    messages = _messages(case)
    results = [torch.zeros_like(parts).share_memory_() for parts in messages]
    # Forked: memory that is shared lies at the same place in all of them.
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank_main, args=(case, rank, addresses, results), daemon=True)
        for rank in range(case.ranks)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + _JOIN_SECONDS
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0.0))
    if any(process.exitcode != 0 for process in ranks):
        return f"exit codes {[process.exitcode for process in ranks]}; None: still waiting for the others"
    for number, (parts, result) in enumerate(zip(messages, results, strict=True)):
        expected = torch.zeros(parts.shape[1])
        for part in parts:
            expected += part.float()
        for rank in range(case.ranks):
            if not torch.equal(result[rank], expected.to(case.dtype)):
                return f"message {number} on rank {rank} is not the sum in the ranks' order"
    return None


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    print(json.dumps({name: what_is_wrong(case) for name, case in CASES.items()}))
