"""Attention over the paged KV pool: store the keys and values of a step, then run the two backends."""

from __future__ import annotations

import torch

from minisgl.attention.backend import DecodeBackend, PrefillBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.attention.split_backend import MOST_ROWS, SplitDecode
from minisgl.kernels.attention.rotary import rotate_and_store, rotate_queries
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import take
from minisgl.wire.plan import IntArray


class PagedAttention:
    """Implements `interface.Attention` for one step at a time; `start` binds the step."""

    def __init__(
        self, kv: PagedKV, prefill: PrefillBackend, decode: DecodeBackend, cascade: CascadeDecode | None = None
    ) -> None:
        """`cascade` serves the decode rows of batches that have cascade tables; without it `decode` does."""
        self._kv = kv
        self._prefill = prefill
        self._decode = decode
        self.cascade = cascade
        self._batch: AttentionBatch
        self._locations: torch.Tensor
        self._is_captured = False

    @property
    def in_window(self) -> bool:
        """Its layers have a window, and pages of their own."""
        return self._kv.in_window

    @property
    def most_graph_keys(self) -> int:
        """Most keys of all prompt segments of a captured step; 0: steps with prompts cannot be captured."""
        return self._prefill.most_graph_keys

    def is_long(self, lengths: IntArray) -> bool:
        """Whether steps of decode rows of these `lengths` [D] have graphs of their own, see `for_long_graph`."""
        return isinstance(self._decode, SplitDecode) and self._decode.is_long(lengths)

    def for_long_graph(self, rows: int) -> PagedAttention | None:
        """Attention for captured steps of exactly `rows` decode rows that are `is_long`; None if there are none."""
        if not isinstance(self._decode, SplitDecode) or self._decode.long is None or rows > MOST_ROWS:
            return None
        captured = PagedAttention(self._kv, self._prefill, self._decode.long)
        return captured.for_graph(rows)

    def for_graph(self, rows: int, tokens: int = 0, *, segments: int = 0, prefix: bool = True) -> PagedAttention | None:
        """Attention for captured steps of exactly `rows` decode rows, and `tokens` prompt tokens in `segments`; None if
        a backend cannot be captured. `prefix`: segments may begin behind one."""
        decode = self._decode.for_graph(rows) if rows else self._decode
        prefill = self._prefill.for_graph(tokens, segments, prefix=prefix) if tokens else self._prefill
        if decode is None or prefill is None:
            return None
        captured = PagedAttention(self._kv, prefill, decode, self.cascade)
        captured._is_captured = True
        return captured

    def prepare(self, batch: AttentionBatch) -> None:
        """Do the host work of the step. It stays outside a CUDA graph: every replay needs it again."""
        if batch.num_decode:
            self._decoder(batch).prepare(self._rows(batch))
        if batch.num_segments:
            self._prefill.prepare(batch)

    def begin(self, batch: AttentionBatch, locations: torch.Tensor) -> None:
        """Bind the step and do the device work that all layers share. `locations` [T] int64: page * page_size +
        offset at which each token's key and value are stored."""
        self._batch, self._locations = batch, locations
        if batch.num_decode:
            self._decoder(batch).begin(self._rows(batch))
        if batch.num_segments:
            self._prefill.begin(batch)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = self._batch
        if k is None or v is None:
            return self._attend_to_stored(layer, q, rotation, sinks)
        d = batch.num_decode
        if d and isinstance(decoder := self._decoder(batch), SplitDecode) and decoder.rotates(batch):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            decoder.rotate_and_decode(layer, self._kv, q, k, v, rotation, out, sinks)
            return out.flatten(1)
        # Before any attention, for all tokens: a segment may start behind a prefix that another segment of the
        # same step computes.
        kv = self._kv
        q, segment_keys, segment_values = rotate_and_store(
            q, k, v, rotation, kv.keys[layer], kv.values[layer], self._locations, kept_from=d, scales=kv.scales[layer]
        )
        out = torch.empty_like(q)
        if d:
            self._decoder(batch).decode(layer, self._kv, q[:d], out[:d], sinks)
        if batch.num_segments:
            self._prefill.prefill(layer, self._kv, q[d:], segment_keys, segment_values, out[d:], sinks)
        return out.flatten(1)

    def _attend_to_stored(
        self, layer: int, q: torch.Tensor, rotation: Rotation, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of a layer that has no keys and values of its own."""
        batch, kv = self._batch, self._kv
        d = batch.num_decode
        q = rotate_queries(q, rotation)
        out = torch.empty_like(q)
        if d:
            self._decoder(batch).decode(layer, kv, q[:d], out[:d], sinks)
        if batch.num_segments:
            # For kernels that read only prefixes from the pool.
            own = self._locations[d:]
            keys, values = (take(pool[layer].flatten(0, 1), own, q.dtype) for pool in (kv.keys, kv.values))
            self._prefill.prefill(layer, kv, q[d:], keys, values, out[d:], sinks)
        return out.flatten(1)

    def _rows(self, batch: AttentionBatch) -> AttentionBatch:
        """The batch for the decode backend. Beside prompts, backends choose kernels that are cheap to launch, as all
        are in a graph."""
        return batch.decode_rows() if self._is_captured else batch

    def _decoder(self, batch: AttentionBatch) -> DecodeBackend:
        return self._decode if batch.cascade is None or self.cascade is None else self.cascade
