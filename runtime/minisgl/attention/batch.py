"""Inputs of an attention backend: the sequences of one step and the paged KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minisgl.attention.cascade import CascadeTables
from minisgl.kernels.attention.stored_kv import FP8, KVScales
from minisgl.kernels.pointwise.fp8_rows import E4M3_NAN
from minisgl.wire.plan import EMPTY, IntArray


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of layers with equal heads. One page holds `page_size` consecutive positions of one sequence; the
    last page has no owner: padding rows write to it."""

    keys: torch.Tensor
    """[layers, pages + 1, page_size, Hkv, D]"""
    values: torch.Tensor
    """[layers, pages + 1, page_size, Hkv, D]"""
    scales: tuple[KVScales, ...]
    """Factors of each layer's keys and values."""
    in_window: bool = False
    """The layers have a window: their pages are those of `AttentionBatch.window_table`."""

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def dummy_page(self) -> int:
        return self.keys.shape[1] - 1

    def poison(self, pages: torch.Tensor) -> None:
        """Fill `pages` [Z] with NaN, so that reading a page without an owner shows in the logits."""
        for pool in (self.keys, self.values):
            if pool.dtype == FP8:
                pool.view(torch.uint8).index_fill_(1, pages, E4M3_NAN)
            else:
                pool.index_fill_(1, pages, float("nan"))


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of all layers. Groups without a window have the same pages: page p of a sequence is page p of
    each of them; so have those with one."""

    groups: tuple[PagedKV, ...]
    """Those of each group of layers, see `select.KVGroup`."""

    @property
    def page_size(self) -> int:
        return self.groups[0].page_size

    @property
    def has_windows(self) -> bool:
        return any(group.in_window for group in self.groups)

    def dummy_page(self, *, in_window: bool) -> int:
        """The page without an owner, of layers with or without a window; 0 if there are none."""
        return next((group.dummy_page for group in self.groups if group.in_window == in_window), 0)

    def poison(self, pages: torch.Tensor, *, in_window: bool) -> None:
        """As `PagedKV.poison`, in all layers with or without a window."""
        for group in self.groups:
            if group.in_window == in_window:
                group.poison(pages)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step: D decode rows of one token each, then P prefill segments, T tokens in all.

    Tensors are on the device. Lengths are also on the host, so that a backend that plans on the CPU never waits for
    the device.
    """

    page_table: torch.Tensor
    """[max_running + 1, pages_per_row] int32"""
    decode_slots: torch.Tensor
    """[D] int32"""
    decode_lengths: torch.Tensor
    """[D] int32: positions that the row attends to, including its own token."""
    prefill_slots: torch.Tensor
    """[P] int32"""
    query_offsets: torch.Tensor
    """[P + 1] int32: offset of each segment among the prefill tokens."""
    prefill_kv_lengths: torch.Tensor
    """[P] int32: start + length of each segment."""
    host_decode_lengths: IntArray
    host_prefill_starts: IntArray
    host_prefill_lengths: IntArray
    cascade: CascadeTables | None = None
    """Shared prefixes of the decode rows, if the step uses cascade attention."""
    has_drafts: bool = False
    """Whether decode rows attend to keys and values that others of the same step store."""
    window_table: torch.Tensor | None = None
    """As `page_table`, for layers with a window; None: there are none. Pages behind the window of a row's first token
    in the step are not the row's any more."""

    @property
    def num_decode(self) -> int:
        return len(self.host_decode_lengths)

    @property
    def num_segments(self) -> int:
        return len(self.host_prefill_lengths)

    def in_window(self) -> AttentionBatch:
        """The batch for layers with a window: `page_table` is theirs."""
        assert self.window_table is not None
        return replace(self, page_table=self.window_table)

    def decode_rows(self) -> AttentionBatch:
        """The batch without its prefill segments."""
        if not self.num_segments:
            return self
        none = self.prefill_slots[:0]
        return replace(
            self,
            prefill_slots=none,
            query_offsets=self.query_offsets[:1],
            prefill_kv_lengths=none,
            host_prefill_starts=EMPTY,
            host_prefill_lengths=EMPTY,
        )
