"""`place_drafts` on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.speculation.row_text_tables import RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows

_BLOCK = 512


# Slices of a step's inputs begin at any address, and sizes change with every step: one compiled kernel for all.
@triton.jit(
    do_not_specialize=["capacity", "decode", "sampled", "dummy_slot"],
    do_not_specialize_on_alignment=[
        "slots", "positions", "lengths", "sample_positions", "sample_rows", "next_position", "limit", "origin", "texts",
    ],
)  # fmt: skip
def _place_drafts(
    slots, positions, lengths, sample_positions, sample_rows, next_position, limit, origin, texts, tokens, capacity,
    decode, sampled, dummy_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program, since rows that sample read the lengths of all decode rows.
    lane = tl.arange(0, BLOCK)
    for begin in range(0, decode, BLOCK):
        row = begin + lane
        exists = row < decode
        slot = tl.load(slots + row, exists, other=0).to(tl.int64)
        position = tl.load(next_position + slot) + tl.load(positions + row, exists, other=0)
        inside = position < tl.load(limit + slot) - 1
        at = slot * capacity + tl.load(origin + slot) + position
        token = tl.load(texts + at, exists & inside, other=0)
        position = tl.where(inside, position, 0)
        tl.store(tokens + row, tl.maximum(token, 0), exists)
        tl.store(slots + row, dummy_slot, exists & (inside == 0))
        tl.store(positions + row, position, exists)
        tl.store(lengths + row, position + 1, exists)
    tl.debug_barrier()
    for begin in range(0, sampled, BLOCK):
        row = begin + lane
        after = tl.load(sample_rows + row, row < sampled, other=decode)
        tl.store(sample_positions + row, tl.load(lengths + after, after < decode, other=0), after < decode)


def place_drafts_cuda(tables: RowTextTables, rows: DecodeRows, dummy_slot: int) -> torch.Tensor:
    tokens = torch.empty_like(rows.slots)
    _place_drafts[(1,)](
        *rows[:3], rows.sample_positions, rows.sample_rows, tables.next_position, tables.limit, tables.origin,
        tables.texts, tokens, tables.texts.stride(0), len(rows.slots), len(rows.sample_rows), dummy_slot, BLOCK=_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return tokens
