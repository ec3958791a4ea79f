"""Reference attention in plain torch, on any device, for any head size and page size.

Every position is read from a page that the sequence owns and has written: padding reads the first position that the
row attends to again and masks it. Values outside a sequence, even NaN, cannot reach its result.
"""

from __future__ import annotations

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.reference import attend
from minisgl.kernels.attention.stored_kv import take

_GATHER_ELEMENTS = 1 << 24
"""Most elements of the gathered keys of a group of decode rows (64 MiB in float32)."""


class TorchDecode:
    name = "torch"

    def __init__(self, shape: AttentionShape) -> None:
        self._page_size = shape.page_size
        self._window = shape.window
        self._scale, self._softcap = shape.score_scale, shape.softcap
        self._positions_per_group = _GATHER_ELEMENTS // (shape.kv_heads * shape.head_dim)
        self._groups: list[tuple[slice, torch.Tensor, torch.Tensor]] = []

    def for_graph(self, size: int) -> None:
        """Return None: shapes depend on the lengths of each step, so it cannot be captured."""
        return

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing: this backend plans nothing on the host."""

    def begin(self, batch: AttentionBatch) -> None:
        self._groups.clear()
        attended = batch.decode_lengths
        starts = torch.zeros_like(attended)
        lengths = batch.host_decode_lengths.tolist()
        if self._window is not None:
            attended = attended.clamp(max=self._window)
            starts = batch.decode_lengths - attended
            lengths = [min(length, self._window) for length in lengths]
        first = 0
        while first < len(lengths):
            longest, last = lengths[first], first + 1
            while last < len(lengths):
                longest_with = max(longest, lengths[last])
                if (last + 1 - first) * longest_with > self._positions_per_group:
                    break
                longest, last = longest_with, last + 1
            rows = slice(first, last)
            positions = torch.arange(longest, device=batch.page_table.device)
            valid = positions < attended[rows, None]
            positions = starts[rows, None] + positions * valid
            locations = _locations(batch.page_table, batch.decode_slots[rows, None], positions, self._page_size)
            self._groups.append((rows, locations, valid[:, None, None, :]))
            first = last

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        keys, values = kv.keys[layer].flatten(0, 1), kv.values[layer].flatten(0, 1)
        scales = kv.scales[layer]
        scale = scales.key * self._scale
        for rows, locations, mask in self._groups:
            # Treat the query heads of one KV head as query positions, which avoids a copy of keys per query head.
            grouped = q[rows].unflatten(1, (keys.shape[1], -1))
            k = take(keys, locations, q.dtype).transpose(1, 2)
            v = take(values, locations, q.dtype).transpose(1, 2)
            of_vectors = None if sinks is None else sinks.view(keys.shape[1], -1)
            attended = attend(grouped, k, v, mask, scale=scale, softcap=self._softcap, sinks=of_vectors)
            out[rows] = attended.flatten(1, 2) * scales.value

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        return self.name


class TorchPrefill:
    name = "torch"
    most_graph_keys = 0

    def __init__(self, shape: AttentionShape) -> None:
        self._page_size = shape.page_size
        self._window = shape.window
        self._scale, self._softcap = shape.score_scale, shape.softcap
        self._segments: list[tuple[slice, torch.Tensor, torch.Tensor | None]] = []

    def for_graph(self, tokens: int, segments: int, *, prefix: bool) -> None:
        """Return None: the work of a step follows from lengths on the host."""
        return

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing: this backend plans nothing on the host."""

    def begin(self, batch: AttentionBatch) -> None:
        self._segments.clear()
        offset = 0
        lengths = batch.host_prefill_lengths.tolist()
        for i, (start, length) in enumerate(zip(batch.host_prefill_starts.tolist(), lengths, strict=True)):
            if not length:
                continue
            end = start + length
            window = end if self._window is None else min(self._window, end)
            first = max(0, start + 1 - window)
            positions = torch.arange(first, end, device=batch.page_table.device)
            locations = _locations(batch.page_table, batch.prefill_slots[i], positions, self._page_size)
            mask = None
            if start or window < end:
                distances = positions[start - first :, None] - positions
                mask = (distances >= 0) & (distances < window)
            self._segments.append((slice(offset, offset + length), locations, mask))
            offset += length

    def prefill(
        self,
        layer: int,
        kv: PagedKV,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        keys, values = kv.keys[layer].flatten(0, 1), kv.values[layer].flatten(0, 1)
        scales = kv.scales[layer]
        for tokens, locations, mask in self._segments:
            attended = attend(
                q[tokens].transpose(0, 1)[None],
                take(keys, locations, q.dtype).transpose(0, 1)[None],
                take(values, locations, q.dtype).transpose(0, 1)[None],
                mask,
                scale=scales.key * self._scale,
                softcap=self._softcap,
                sinks=None if sinks is None else sinks[:, None],
            )
            out[tokens] = attended[0].transpose(0, 1) * scales.value

    def backend_for(self, *, prefix: bool) -> str:
        return self.name


def _locations(page_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Row of the flattened pool that stores each position of a sequence; int64, broadcast of slots and positions."""
    pages = page_table[slots, positions // page_size]
    return pages.long() * page_size + positions % page_size
