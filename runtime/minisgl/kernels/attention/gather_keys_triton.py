"""`locate_keys` and `gather_keys` on CUDA: one launch per step and one per layer. The number of keys is only on the
device, so a captured launch serves any number."""

import torch
import triton
import triton.language as tl

from minisgl.hopper import MULTIPROCESSORS
from minisgl.kernels.attention.stored_kv import GUARD, KeyRows

_BLOCK = 256
_MOST_BLOCKS = 64
"""Programs of a segment; each takes every so many blocks."""
_PROGRAMS = 4 * MULTIPROCESSORS
"""Programs of a copy."""
_PROGRAM_BYTES = 32 << 10
"""Bytes that a program copies at a time."""


# One compiled kernel for all sizes of pages.
@triton.jit(
    do_not_specialize=["pages_per_row", "page_size"],
    do_not_specialize_on_alignment=["slots", "lengths", "offsets", "rows"],
)
def _locate(
    page_table, slots, lengths, offsets, rows, pages_per_row, page_size, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, segment, BLOCK):
        before += tl.load(lengths + start + lane, start + lane < segment, other=0)
    first = tl.sum(before, 0)
    length = tl.load(lengths + segment)
    slot = tl.load(slots + segment).to(tl.int64)
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        position = start + lane
        mask = position < length
        page = tl.load(page_table + slot * pages_per_row + position // page_size, mask, other=0)
        tl.store(rows + first + position, page * page_size + position % page_size, mask)
    if tl.program_id(1) == 0:
        tl.store(offsets + segment, first)
        if segment == tl.num_programs(0) - 1:
            tl.store(offsets + segment + 1, first + length)
            guard = tl.arange(0, GUARD)
            tl.store(rows + first + length + guard, tl.full((GUARD,), -1, tl.int32))


@triton.jit(do_not_specialize_on_alignment=["rows", "end"])
def _gather(
    keys, values, rows, end, key_out, value_out,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    total = tl.load(end) + GUARD
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    for start in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        source = tl.load(rows + row, row < total, other=-1).to(tl.int64)
        place = source[:, None] * WIDTH + column
        mask = (source >= 0)[:, None] & inside
        key = tl.load(keys + place, mask, other=0.0)
        value = tl.load(values + place, mask, other=0.0)
        target = row.to(tl.int64)[:, None] * WIDTH + column
        here = (row < total)[:, None] & inside
        tl.store(key_out + target, key.to(key_out.dtype.element_ty), here)
        tl.store(value_out + target, value.to(value_out.dtype.element_ty), here)


def locate_keys_cuda(
    page_table: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, page_size: int, most_keys: int
) -> KeyRows:
    segments = len(slots)
    offsets = torch.empty(segments + 1, dtype=torch.int32, device=slots.device)
    rows = torch.empty(most_keys + GUARD, dtype=torch.int32, device=slots.device)
    blocks = min(triton.cdiv(most_keys, _BLOCK), _MOST_BLOCKS)
    _locate[(segments, blocks)](
        page_table, slots, lengths, offsets, rows, page_table.stride(0), page_size, GUARD=GUARD, BLOCK=_BLOCK,
    )  # fmt: skip
    return KeyRows(offsets, rows)


def gather_keys_cuda(
    keys: torch.Tensor, values: torch.Tensor, located: KeyRows, key_out: torch.Tensor, value_out: torch.Tensor
) -> None:
    assert keys.is_contiguous() and values.is_contiguous() and key_out.is_contiguous() and value_out.is_contiguous()
    width = keys.shape[2] * keys.shape[3]
    columns = triton.next_power_of_2(width)
    together = max(_PROGRAM_BYTES // (2 * columns * keys.element_size()), 1)
    programs = min(triton.cdiv(len(located.rows), together), _PROGRAMS)
    _gather[(programs,)](
        keys, values, located.rows, located.offsets[-1:], key_out, value_out, WIDTH=width, COLUMNS=columns,
        ROWS=together, GUARD=GUARD, num_warps=8,
    )  # fmt: skip
