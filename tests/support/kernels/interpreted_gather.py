"""The kernels that copy keys in Triton's interpreter on a CPU, against the same functions in torch.

Run `python -m support.kernels.interpreted_gather`. A process of its own, for whether kernels are interpreted is settled
when Triton is imported. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.kernels.attention.gather_keys import gather_keys, locate_keys
from minisgl.kernels.attention.stored_kv import FP8, GUARD, as_stored
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


@dataclass(frozen=True)
class Case:
    lengths: Sequence[int]
    page_size: int = 16
    heads: int = 2
    head_dim: int = 64
    fp8: bool = False
    room: int = 0
    """Keys that there is place for behind the last one."""


CASES = {
    "one segment": Case((100,)),
    "ends of pages": Case((16, 15, 17, 64, 1)),
    "pages of 64": Case((130, 64, 1, 300), page_size=64),
    "empty segments": Case((0, 40, 0, 0, 7, 0)),
    "room behind the last key": Case((33, 20, 0), room=700),
    "more segments than a block": Case((1, 2, 3) * 100, head_dim=16),
    "three heads of 96": Case((70, 9), heads=3, head_dim=96),
    "FP8": Case((16, 15, 17, 64, 1), fp8=True),
    "longer than all blocks of a segment": Case((300, 17_000), heads=1, head_dim=16),
}


def agrees(case: Case) -> bool:
    from minisgl.kernels.attention.gather_keys_triton import gather_keys_cuda, locate_keys_cuda

    generator = torch.Generator().manual_seed(0)
    segments, most = len(case.lengths), sum(case.lengths) + case.room
    per_row = max(-(-max(case.lengths) // case.page_size), 1)
    pages = segments * per_row + 1
    table = torch.randperm(pages - 1, generator=generator).int().view(segments, per_row)
    slots = torch.randperm(segments, generator=generator).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    size = (pages, case.page_size, case.heads, case.head_dim)
    keys, values = (torch.randn(size, generator=generator, dtype=torch.float16) for _ in "kv")
    if case.fp8:
        keys, values = (as_stored(pool, FP8, 0.1) for pool in (keys, values))
    expected = locate_keys(table, slots, lengths, page_size=case.page_size, most_keys=most)
    located = locate_keys_cuda(table, slots, lengths, case.page_size, most)
    end = sum(case.lengths) + GUARD
    results = []
    for copy, where in ((gather_keys, expected), (gather_keys_cuda, located)):
        out = [torch.full((most + GUARD, case.heads, case.head_dim), torch.nan, dtype=torch.float16) for _ in "kv"]
        copy(keys, values, where, *out)
        results.append(out)
    return (
        torch.equal(located.offsets, expected.offsets)
        and torch.equal(located.rows[:end], expected.rows[:end])
        and all(
            torch.equal(ours[:end], theirs[:end]) and bool(ours[end:].isnan().all())
            for theirs, ours in zip(*results, strict=True)
        )
    )


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: agrees(case) for name, case in CASES.items()}))
