"""Decode attention of many rows of different lengths: see `kernels/attention/stream_k_decode_gluon.py`."""

from __future__ import annotations

import math
from typing import Final

import torch

from minisgl.attention.backend import AttentionShape, DecodeBackend
from minisgl.attention.batch import AttentionBatch, PagedKV

FEWEST_ROWS: Final = 9
"""Below this number most rows are split many times, and kernels with a fixed number of programs per row are as fast.
The backend for a row count does not depend on captured sizes: a step runs the same kernel with and without a graph."""

_BLOCK: Final = 32
_BLOCK_ELEMENTS: Final = 4096
"""Most elements of the keys of a block: the registers of a warp hold keys, values and results."""
_PROGRAM_BYTES: Final = 48 << 10
_PROGRAMS: Final = 4
"""Programs per multiprocessor: as many as fit into its shared memory."""
_MAX_GROUP: Final = 16


def why_not(shape: AttentionShape) -> str | None:
    """Reason why these kernels cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.softcap is not None:
        return "it does not bound scores"
    if torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "it needs a Hopper GPU"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.page_size % 16:
        return f"it serves pages of a multiple of 16 tokens, not {shape.page_size}"
    if shape.head_dim not in (64, 128, 256):
        return f"it serves head sizes 64, 128 and 256, not {shape.head_dim}"
    if shape.group > _MAX_GROUP:
        return f"it serves up to {_MAX_GROUP} query heads per KV head, not {shape.group}"
    return None


class BalancedDecode:
    """Implements `DecodeBackend` for batches of FEWEST_ROWS rows or more. Smaller batches, and rows beside prompts, use
    `few` if it is given."""

    name = "balanced"

    def __init__(self, shape: AttentionShape, few: DecodeBackend | None) -> None:
        from minisgl.kernels.attention import stream_k_decode_gluon as kernels

        block = math.gcd(shape.page_size, min(_BLOCK, _BLOCK_ELEMENTS // shape.head_dim))
        stages = _PROGRAM_BYTES // (2 * block * shape.head_dim * shape.stored_dtype.itemsize)
        self.settings = kernels.Settings(block, stages, _PROGRAMS)
        self._shape, self._few, self._kernels = shape, few, kernels
        self._scale = shape.score_scale * math.log2(math.e)
        self._spans: kernels.Spans | None = None
        self._batch: AttentionBatch

    def for_graph(self, size: int) -> DecodeBackend | None:
        # All steps write to the same buffers, so all graphs can share this object.
        few = self._other(size)
        return self if few is None else few.for_graph(size)

    def prepare(self, batch: AttentionBatch) -> None:
        if few := self._other(batch.num_decode, batch.num_segments):
            few.prepare(batch)
        elif self._spans is None:
            self._allocate(batch.page_table)

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        if few := self._other(batch.num_decode, batch.num_segments):
            few.begin(batch)
            return
        assert self._spans is not None
        self._kernels.cut_spans(
            batch.page_table,
            batch.decode_slots,
            batch.decode_lengths,
            self._spans,
            page_size=self._shape.page_size,
            block=self.settings.block,
            window=self._shape.window,
        )

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        batch = self._batch
        if few := self._other(batch.num_decode, batch.num_segments):
            few.decode(layer, kv, q, out, sinks)
            return
        assert self._spans is not None
        self._kernels.balanced_decode(
            q,
            kv.keys[layer],
            kv.values[layer],
            batch.decode_lengths,
            self._spans,
            self._parts,
            self._sums,
            self._arrivals,
            out,
            scale=self._scale,
            scales=kv.scales[layer],
            settings=self.settings,
            window=self._shape.window,
            sinks=sinks,
        )

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        few = self._other(rows, int(mixed))
        return self.name if few is None else few.backend_for(rows, mixed=mixed)

    def _other(self, rows: int, segments: int = 0) -> DecodeBackend | None:
        # Steps with prompts are launched kernel by kernel. There two tensor maps per launch cost the host more than the
        # device gains.
        return self._few if rows < FEWEST_ROWS or segments else None

    def _allocate(self, page_table: torch.Tensor) -> None:
        """Allocate buffers for the largest batch over `page_table`."""
        shape, (rows, pages) = self._shape, page_table.shape
        blocks = rows * pages * (shape.page_size // self.settings.block)
        programs = self.settings.programs * torch.cuda.get_device_properties(shape.device).multi_processor_count
        # The kernel computes spans * blocks in 32 bits.
        spans = max(1, min(programs // shape.kv_heads, (2**31 - 1) // blocks - 1))

        def numbers(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=shape.device)

        self._spans = self._kernels.Spans(numbers(rows), numbers(blocks), numbers(blocks))
        self._arrivals = numbers(rows, shape.kv_heads)
        sums = (2 * spans, shape.query_heads)
        self._sums = torch.empty(sums, dtype=torch.float32, device=shape.device)
        self._parts = torch.empty((*sums, shape.head_dim), dtype=torch.float32, device=shape.device)
