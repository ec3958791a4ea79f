"""Copy of the keys and values of segments from the pages of one layer to contiguous memory, for attention kernels that
read no pages."""

from __future__ import annotations

import torch

from minisgl.kernels.attention.stored_kv import GUARD, KeyRows, take


def locate_keys(
    page_table: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, *, page_size: int, most_keys: int
) -> KeyRows:
    """Find positions 0 to `lengths` [P] of `slots` [P], int32 both, in the pages of `page_table`. There are at most
    `most_keys` in all. A CUDA graph can capture it."""
    if slots.is_cuda:
        from minisgl.kernels.attention.gather_keys_triton import locate_keys_cuda

        return locate_keys_cuda(page_table, slots, lengths, page_size, most_keys)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    segment = torch.repeat_interleave(lengths)
    position = torch.arange(len(segment), dtype=torch.int32) - offsets[segment]
    rows = torch.full((most_keys + GUARD,), -1, dtype=torch.int32)
    rows[: len(segment)] = page_table[slots[segment], position // page_size] * page_size + position % page_size
    return KeyRows(offsets, rows)


def gather_keys(
    keys: torch.Tensor, values: torch.Tensor, located: KeyRows, key_out: torch.Tensor, value_out: torch.Tensor
) -> None:
    """Copy the located rows of one layer's `keys` and `values` [pages, page_size, Hkv, D], and zeros behind them, to
    `key_out` and `value_out` [at least keys + GUARD, Hkv, D], in their type."""
    if keys.is_cuda:
        from minisgl.kernels.attention.gather_keys_triton import gather_keys_cuda

        gather_keys_cuda(keys, values, located, key_out, value_out)
        return
    total = int(located.offsets[-1])
    for pool, out in ((keys, key_out), (values, value_out)):
        out[:total] = take(pool.flatten(0, 1), located.rows[:total], out.dtype)
        out[total : total + GUARD] = 0
