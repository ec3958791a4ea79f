"""What an attention backend sees of one step, and the paged cache it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.attention.cascade import CascadeTables
from minisgl.wire.plan import IntArray


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of all layers. One page holds `page_size` consecutive positions of one sequence; the last
    page belongs to nobody: rows that only pad a batch write to it."""

    keys: torch.Tensor
    """[layers, pages + 1, page_size, Hkv, D]"""
    values: torch.Tensor
    """[layers, pages + 1, page_size, Hkv, D]"""

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def dummy_page(self) -> int:
        return self.keys.shape[1] - 1

    def poison(self, pages: torch.Tensor) -> None:
        """Fill `pages` [Z] with NaN, so that a read of a page that nobody owns shows in the logits."""
        self.keys.index_fill_(1, pages, float("nan"))
        self.values.index_fill_(1, pages, float("nan"))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step: D decode rows of one token each, then P prefill segments, T tokens in all.

    Tensors are on the device. Lengths are kept on the host as well: a backend that plans its work on the CPU
    reads them there and never waits for the device.
    """

    page_table: torch.Tensor
    """[max_running + 1, pages_per_row] int32"""
    decode_slots: torch.Tensor
    """[D] int32"""
    decode_lengths: torch.Tensor
    """[D] int32: positions that the row attends to, its own token's included."""
    prefill_slots: torch.Tensor
    """[P] int32"""
    query_offsets: torch.Tensor
    """[P + 1] int32: where each segment's tokens begin among the prefill tokens."""
    prefill_kv_lengths: torch.Tensor
    """[P] int32: start + length of each segment."""
    host_decode_lengths: IntArray
    host_prefill_starts: IntArray
    host_prefill_lengths: IntArray
    cascade: CascadeTables | None = None
    """What the decode rows share, where the step makes use of it."""

    @property
    def num_decode(self) -> int:
        return len(self.host_decode_lengths)

    @property
    def num_segments(self) -> int:
        return len(self.host_prefill_lengths)
