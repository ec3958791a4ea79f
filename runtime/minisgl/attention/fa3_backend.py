"""FlashAttention-3 for segments. Its kernel reads no pages smaller than a tile, so keys and values of segments with a
prefix are first copied from the pool to contiguous memory, one layer at a time. In steps whose segments all begin at
position 0, they attend to the keys of the step itself."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from minisgl.attention.backend import AttentionShape, PrefillBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.hopper import MULTIPROCESSORS
from minisgl.kernels.attention.fa3 import attend_segments, load_fa3
from minisgl.kernels.attention.gather_keys import gather_keys, locate_keys
from minisgl.kernels.attention.stored_kv import GUARD, KeyRows
from minisgl.wire.plan import IntArray

_LEAST_KEYS: Final = 32_768
"""Keys that the copy has place for even if no sequence is as long: steps may have many segments."""
_COPY_BYTES: Final = 1 << 30
"""Most bytes of the copy. Steps with a longer sequence use the fallback."""
_TILE_ROWS: Final = 128
_SPLIT_KEYS: Final = 512
"""Least keys of a split."""
_MOST_SPLITS: Final = 16
_FEW_QUERIES: Final = 384
"""Query vectors per KV head and key below which a copy costs more than this kernel is faster than flashinfer's."""
_MANY_KEYS: Final = 16_384
"""Keys of a step from which that difference exceeds the host time of flashinfer's plan."""


def why_not(shape: AttentionShape) -> str | None:
    """Reason why this kernel cannot serve `shape`, or None."""
    if shape.softcap is not None:
        return "it does not bound scores"
    return why_not_on(shape.device, shape.dtype, shape.head_dim)


def why_not_on(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Reason why this kernel cannot serve heads of this size, or None."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    if dtype != torch.bfloat16:
        return f"it computes in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 96, 128, 192, 256):
        return f"it has kernels for head sizes 64, 96, 128, 192 and 256, not {head_dim}"
    try:
        load_fa3()
    except (ImportError, OSError) as error:
        return f"fa3-fwd cannot be imported ({error}); install the cuda extra"
    return None


@dataclass(frozen=True, slots=True)
class _Call:
    """Neighbouring segments that one call of the kernel serves."""

    segments: slice
    tokens: slice
    longest_query: int
    longest_key: int
    keys: int
    """Keys of all segments, or an upper bound."""
    splits: int


class Fa3Prefill:
    name = "fa3"

    def __init__(self, shape: AttentionShape, fallback: PrefillBackend) -> None:
        self._shape = shape
        self._fallback = fallback
        row_bytes = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        self.copied_keys = min(max(shape.pages_per_row * shape.page_size, _LEAST_KEYS), _COPY_BYTES // row_bytes)
        """Keys that fit into the copy."""
        # The package is built without sliding windows: longer sequences use the fallback.
        self._most_keys = min(self.copied_keys, shape.window or self.copied_keys)
        self._captures_fallback = shape.window is not None and fallback.most_graph_keys > self._most_keys
        """Steps of sequences that are longer than the window are captured, too."""
        size = (self.copied_keys + GUARD, shape.kv_heads, shape.head_dim)
        self._keys, self._values = (torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
        self._calls: list[_Call] = []
        self._copies = False
        self._falls_back = False
        self._is_captured = False
        self._query_offsets: list[torch.Tensor] = []
        self._located: list[KeyRows] = []

    @property
    def most_graph_keys(self) -> int:
        return self._fallback.most_graph_keys if self._captures_fallback else self._most_keys

    def for_graph(self, tokens: int, segments: int, *, prefix: bool) -> PrefillBackend | None:
        if self._captures_fallback:
            return self._fallback.for_graph(tokens, segments, prefix=prefix)
        # Everything but the sizes is on the device. All graphs can share the copy of the keys.
        captured = copy.copy(self)
        captured._is_captured = True
        captured._falls_back = False
        captured._copies = prefix
        tiles = self._shape.kv_heads * -(-tokens * self._shape.group // _TILE_ROWS)
        keys = self.copied_keys if prefix else tokens
        captured._calls = [_Call(slice(0, segments), slice(0, tokens), tokens, keys, keys, _splits(tiles, keys))]
        return captured

    def prepare(self, batch: AttentionBatch) -> None:
        if self._is_captured:
            return
        starts, lengths = batch.host_prefill_starts, batch.host_prefill_lengths
        ends = starts + lengths
        self._copies = bool(starts.any())
        self._falls_back = self._prefers_fallback(lengths, ends)
        if self._falls_back:
            self._fallback.prepare(batch)
            return
        cuts = _cuts(ends, self.copied_keys) if self._copies else [0, len(ends)]
        offsets = np.concatenate(([0], lengths.cumsum())).tolist()
        self._calls = [
            self._call(slice(first, last), slice(offsets[first], offsets[last]), lengths[first:last], ends[first:last])
            for first, last in itertools.pairwise(cuts)
        ]

    def begin(self, batch: AttentionBatch) -> None:
        if self._falls_back:
            self._fallback.begin(batch)
            return
        self._query_offsets = [
            batch.query_offsets[call.segments.start : call.segments.stop + 1] - call.tokens.start
            if call.tokens.start
            else batch.query_offsets[: call.segments.stop + 1]
            for call in self._calls
        ]
        self._located = [self._locate(batch, call) for call in self._calls] if self._copies else []

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
        if self._falls_back:
            self._fallback.prefill(layer, kv, q, k, v, out, sinks)
            return
        for number, (call, offsets) in enumerate(zip(self._calls, self._query_offsets, strict=True)):
            if self._copies:
                located = self._located[number]
                gather_keys(kv.keys[layer], kv.values[layer], located, self._keys, self._values)
                k, v, key_offsets = self._keys, self._values, located.offsets
            else:
                key_offsets = offsets
            part = out[call.tokens]
            sums = attend_segments(
                q[call.tokens],
                k,
                v,
                part,
                offsets,
                key_offsets,
                longest_query=call.longest_query,
                longest_key=call.longest_key,
                splits=call.splits,
                scale=self._shape.score_scale,
                scales=kv.scales[layer],
            )
            if sinks is not None:
                from minisgl.kernels.attention.sinks_triton import scale_by_share

                scale_by_share(part, sums, sinks, natural=True)

    def _prefers_fallback(self, lengths: IntArray, ends: IntArray) -> bool:
        if int(ends.max()) > (self._shape.window or math.inf):
            return True
        if not self._copies:
            return False
        if int(ends.max()) > self.copied_keys:
            return True
        keys = int(ends.sum())
        few = int(lengths.astype(np.int64) @ ends) * self._shape.group < _FEW_QUERIES * keys
        return few and keys >= _MANY_KEYS and self._fallback.name == "flashinfer"

    def _call(self, segments: slice, tokens: slice, lengths: IntArray, ends: IntArray) -> _Call:
        longest_key = int(ends.max())
        tiles = self._shape.kv_heads * int((-(-lengths * self._shape.group // _TILE_ROWS)).sum())
        return _Call(
            segments=segments,
            tokens=tokens,
            longest_query=int(lengths.max()),
            longest_key=longest_key,
            keys=int(ends.sum()),
            splits=_splits(tiles, longest_key),
        )

    def _locate(self, batch: AttentionBatch, call: _Call) -> KeyRows:
        return locate_keys(
            batch.page_table,
            batch.prefill_slots[call.segments],
            batch.prefill_kv_lengths[call.segments],
            page_size=self._shape.page_size,
            most_keys=call.keys,
        )

    def backend_for(self, *, prefix: bool) -> str:
        fits = self._shape.pages_per_row * self._shape.page_size <= self._most_keys
        falls_back = self._fallback.name == "flashinfer" or not fits
        return f"{self.name}, {self._fallback.name}" if prefix and falls_back else self.name


def _cuts(ends: IntArray, most_keys: int) -> list[int]:
    """Borders of groups of segments with at most `most_keys` keys each; `ends` [P] are the keys of the segments."""
    cuts, keys = [0], 0
    for segment, end in enumerate(ends.tolist()):
        if keys + end > most_keys:
            cuts.append(segment)
            keys = 0
        keys += end
    return [*cuts, len(ends)]


def _splits(tiles: int, longest_key: int) -> int:
    """Programs that share the keys of a tile of queries. A tile that reads all keys alone would take long where there
    are fewer tiles than multiprocessors. Few tiles also bound the memory of partial results."""
    return max(min(MULTIPROCESSORS // tiles, longest_key // _SPLIT_KEYS, _MOST_SPLITS), 1)
