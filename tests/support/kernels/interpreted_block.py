"""The kernel of blocks in Triton's interpreter on a CPU, against the same function in torch.

Run `python -m support.kernels.interpreted_block`. A process of its own, for whether kernels are interpreted is settled
when Triton is imported. Prints, as JSON, the largest difference in each case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.kernels.attention.block_attention import block_attention
from minisgl.kernels.attention.block_contexts import Contexts
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


@dataclass(frozen=True)
class Case:
    lengths: Sequence[int]
    tokens: int = 16
    page_size: int = 64
    kv_heads: int = 2
    group: int = 5
    head_dim: int = 64


CASES = {
    "one block": Case((100,)),
    "ends of pages": Case((64, 63, 65, 1)),
    "no context": Case((0, 5)),
    "small pages": Case((40, 17, 0), page_size=16, head_dim=16),
    "large pages": Case((300, 128), page_size=128, head_dim=16),
    "blocks of seven": Case((33, 70), tokens=7, group=1),
    "heads of 96": Case((70, 9), kv_heads=1, head_dim=96),
}


def difference(case: Case) -> float:
    from minisgl.kernels.attention.block_attention_triton import block_attention_cuda

    generator = torch.Generator().manual_seed(0)
    rows = len(case.lengths)
    per_row = max(-(-max(case.lengths) // case.page_size), 1)
    pages = rows * per_row + 1
    table = torch.randperm(pages, generator=generator)[: rows * per_row].int().view(rows, per_row)
    slots = torch.randperm(rows, generator=generator).int()
    lengths = torch.zeros(rows, dtype=torch.int32)
    lengths[slots.long()] = torch.tensor(case.lengths, dtype=torch.int32)
    pool_size = (pages, case.page_size, case.kv_heads, case.head_dim)
    pools = [torch.randn(pool_size, generator=generator) for _ in "kv"]
    # What no row may read.
    for slot, length in enumerate(lengths.tolist()):
        for pool in pools:
            whole = pool[table[slot].long()].flatten(0, 1)
            whole[length:] = torch.nan
            pool[table[slot].long()] = whole.view(per_row, *pool_size[1:])
    heads = case.kv_heads * case.group
    parts = torch.randn(rows * case.tokens, heads + 2 * case.kv_heads, case.head_dim, generator=generator)
    q, k, v = parts.split([heads, case.kv_heads, case.kv_heads], 1)
    contexts = Contexts(table, slots, lengths)
    expected = block_attention(q, k, v, pools[0], pools[1], contexts, case.head_dim**-0.5)
    found = block_attention_cuda(q, k, v, pools[0], pools[1], contexts, case.head_dim**-0.5)
    return float((found - expected).abs().max())


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: difference(case) for name, case in CASES.items()}))
