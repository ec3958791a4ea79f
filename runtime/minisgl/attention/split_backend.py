"""Decode attention of very few rows, see `kernels/attention/split_kv_decode_triton.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from minisgl.attention.backend import AttentionShape, DecodeBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.kernels.attention.rotation import Rotation
from minisgl.wire.plan import IntArray

if TYPE_CHECKING:
    from minisgl.kernels.attention.split_kv_decode_triton import NewTokens

MOST_ROWS: Final = 4
"""Above this number, kernels that split contexts less also occupy the whole GPU."""
_ROWS_ALONE: Final = 16
"""Rows of a launch where no other backend serves the rest; more would only take more scratch memory."""


def why_not(shape: AttentionShape) -> str | None:
    """Reason why these kernels cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.softcap is not None:
        return "it does not bound scores"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.page_size % 32:
        return f"it serves pages of a multiple of 32 tokens, not {shape.page_size}"
    if shape.head_dim not in (64, 128, 256, 512):
        return f"it serves head sizes 64, 128, 256 and 512, not {shape.head_dim}"
    if shape.group > 16:
        return f"it serves up to 16 query heads per KV head, not {shape.group}"
    return None


def why_not_alone(shape: AttentionShape) -> str | None:
    """Reason why these kernels are not to serve batches of any size of `shape`, or None."""
    if shape.head_dim != 512:
        return f"it serves many rows of heads of 512 only, not of {shape.head_dim}"
    return why_not(shape)


class LongContexts(NamedTuple):
    """Backend of few rows with long contexts, whose time is that of the bytes, which it reads faster."""

    backend: DecodeBackend
    least_bytes: int
    """Keys and values of a layer from which it is faster."""


class SplitDecode:
    """Implements `DecodeBackend` for batches of up to MOST_ROWS rows; larger ones use `many`, and those with long
    contexts `long`. In steps without prompts it can also rotate queries and store keys and values, see `rotates`."""

    def __init__(self, shape: AttentionShape, many: DecodeBackend | None, long: LongContexts | None = None) -> None:
        """`many`: None where no other backend has the size of the heads: then some rows follow the others. `long`:
        backend of batches that are `is_long`; None: there are none."""
        from minisgl.kernels.attention import split_kv_decode_triton as kernels

        self.name = "split" if many is None else many.name
        self._rows_together = MOST_ROWS if many is not None else _ROWS_ALONE
        self.long = None if long is None else long.backend
        self._many = many
        token_bytes = 2 * shape.kv_heads * shape.head_dim * shape.stored_dtype.itemsize
        self._long_tokens = 0 if long is None else -(-long.least_bytes // token_bytes)
        self._kernels = kernels
        self._window = shape.window
        self._scale = shape.score_scale * math.log2(math.e)
        sums = (self._rows_together, shape.query_heads, kernels.SPLITS)
        self._sums = torch.empty(sums, dtype=torch.float32, device=shape.device)
        self._parts = torch.empty((*sums, shape.head_dim), dtype=torch.float32, device=shape.device)
        self._batch: AttentionBatch
        self._serving: DecodeBackend | None = None
        """The backend that serves the batch; None: this one."""

    def for_graph(self, size: int) -> DecodeBackend | None:
        # It plans nothing, so all graphs can share this object. Batches with long contexts have graphs of their own.
        return self if self._many is None or size <= MOST_ROWS else self._many.for_graph(size)

    def is_long(self, lengths: IntArray) -> bool:
        """Whether `long` serves the decode rows of these `lengths` [D]."""
        return self.long is not None and len(lengths) <= MOST_ROWS and int(lengths.sum()) >= self._long_tokens

    def prepare(self, batch: AttentionBatch) -> None:
        if other := self._other(batch):
            other.prepare(batch)

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._serving = self._other(batch)
        if self._serving is not None:
            self._serving.begin(batch)

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        if self._serving is not None:
            self._serving.decode(layer, kv, q, out, sinks)
        else:
            self._run(layer, kv, q, out, sinks, None)

    def rotates(self, batch: AttentionBatch) -> bool:
        """Whether `rotate_and_decode` serves the whole `batch`, which has begun."""
        return not batch.num_segments and self._serving is None and batch.num_decode <= self._rows_together

    def _other(self, batch: AttentionBatch) -> DecodeBackend | None:
        """The backend that serves `batch`; None: this one."""
        if batch.num_decode > MOST_ROWS or batch.has_drafts:
            # These kernels read the pool before other rows of the same step have stored their drafts.
            return self._many
        return self.long if self.is_long(batch.host_decode_lengths) else None

    def rotate_and_decode(
        self,
        layer: int,
        kv: PagedKV,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`rotate_and_store` of q [D, Hq, D], k and v [D, Hkv, D], the last two dimensions of these contiguous, then
        `decode`."""
        self._run(layer, kv, q, out, sinks, self._kernels.NewTokens(k, v, rotation))

    def _run(
        self,
        layer: int,
        kv: PagedKV,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        new: NewTokens | None,
    ) -> None:
        batch = self._batch
        for first in range(0, len(q), self._rows_together):
            rows = slice(first, first + self._rows_together)
            self._kernels.split_decode(
                q[rows],
                kv.keys[layer],
                kv.values[layer],
                batch.page_table,
                batch.decode_slots[rows],
                batch.decode_lengths[rows],
                self._parts,
                self._sums,
                out[rows],
                scale=self._scale,
                scales=kv.scales[layer],
                window=self._window,
                sinks=sinks,
                new=new,
            )

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        if rows > MOST_ROWS and self._many is not None:
            return self._many.backend_for(rows, mixed=mixed)
        return "split" if self.long is None else f"split, {self.long.backend_for(rows, mixed=mixed)}"
