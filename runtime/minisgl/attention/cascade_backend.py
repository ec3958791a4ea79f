"""Decode attention that reads shared pages once, see `kernels/attention/cascade_decode_triton.py`."""

from __future__ import annotations

import math
from typing import Final

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.cascade import MAX_SPLITS, TILE_VECTORS, CascadeLayout

_PAGE_SIZES: Final = (16, 32, 64, 128)
_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
"""Programs of the kernel for shared pages that fit into registers and shared memory of a Hopper GPU."""
_PART_TOKENS: Final = 512
"""Least tokens per part of a prefix."""


def why_not(shape: AttentionShape) -> str | None:
    """Reason why these kernels cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.softcap is not None:
        return "it does not bound scores"
    if shape.sinks:
        return "it has no sinks"
    if shape.window is not None:
        return "rows attend to different parts of a shared prefix through a sliding window"
    if torch.cuda.get_device_capability(shape.device)[0] < 8:
        return "it needs an Ampere GPU or a later one"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.page_size not in _PAGE_SIZES:
        return f"it serves pages of 16, 32, 64 or 128 tokens, not {shape.page_size}"
    if shape.head_dim not in (64, 128):
        return f"it serves head sizes 64 and 128, not {shape.head_dim}"
    if shape.group > TILE_VECTORS:
        return f"it serves up to {TILE_VECTORS} query heads per KV head, not {shape.group}"
    return None


class CascadeDecode:
    """Implements `DecodeBackend` for batches with `AttentionBatch.cascade`. It plans nothing, so all graphs can
    share this object."""

    name = "cascade"

    def __init__(self, shape: AttentionShape, max_rows: int) -> None:
        """`max_rows`: rows of the largest batch."""
        from minisgl.kernels.attention.cascade_decode_triton import cascade_decode

        self._run = cascade_decode
        properties = torch.cuda.get_device_properties(shape.device)
        self.layout = CascadeLayout(
            group=shape.group,
            kv_heads=shape.kv_heads,
            programs=_PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count,
            part_pages=_PART_TOKENS // shape.page_size,
        )
        self._scale = shape.score_scale * math.log2(math.e)
        sums = (MAX_SPLITS, max_rows, shape.query_heads)
        self._sums = torch.empty(sums, dtype=torch.float32, device=shape.device)
        # Parts are rounded like the output: that hardly raises its error and halves memory traffic that occurs twice.
        self._parts = torch.empty((*sums, shape.head_dim), dtype=shape.dtype, device=shape.device)
        self._batch: AttentionBatch
        self._page_table: torch.Tensor

    def for_graph(self, size: int) -> CascadeDecode:
        return self

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing: this backend plans nothing on the host."""

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._page_table = batch.page_table[batch.decode_slots]

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        batch, tables = self._batch, self._batch.cascade
        assert tables is not None
        self._run(
            q,
            kv.keys[layer],
            kv.values[layer],
            self._page_table,
            batch.decode_lengths,
            tables.counts,
            tables.prefix_pages,
            tables.tiles,
            self._parts,
            self._sums,
            out,
            scale=self._scale,
            scales=kv.scales[layer],
            programs=self.layout.programs,
        )

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        return self.name
