"""Decode attention of many rows of different lengths: see `kernels/balanced_decode_gluon.py`."""

from __future__ import annotations

import math
from typing import Final

import torch

from minisgl.attention.backend import AttentionShape, DecodeBackend
from minisgl.attention.batch import AttentionBatch, PagedKV

FEWEST_ROWS: Final = 9
"""With fewer rows most are cut many times, and kernels that give every row the same number of programs do as well. From
one captured size to the next the choice is the same, so that a step gets the same kernel with and without a graph."""

_BLOCK: Final = 32
_PROGRAM_BYTES: Final = 48 << 10
_PROGRAMS: Final = 4
"""On a multiprocessor: as many as its shared memory has room for."""
_MAX_GROUP: Final = 16


def why_not(shape: AttentionShape) -> str | None:
    """Why these kernels cannot serve `shape`; None: they can."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "it needs a Hopper GPU"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.page_size % 16:
        return f"it serves pages of a multiple of 16 tokens, not {shape.page_size}"
    if shape.head_dim not in (64, 128):
        return f"it serves head sizes 64 and 128, not {shape.head_dim}"
    if shape.group > _MAX_GROUP:
        return f"it serves up to {_MAX_GROUP} query heads per KV head, not {shape.group}"
    return None


class BalancedDecode:
    """Implements `DecodeBackend`: batches of FEWEST_ROWS rows and more by itself; smaller ones and rows beside prompts
    by `few`, if there is such a backend."""

    name = "balanced"

    def __init__(self, shape: AttentionShape, few: DecodeBackend | None) -> None:
        from minisgl.kernels import balanced_decode_gluon as kernels

        block = math.gcd(shape.page_size, _BLOCK)
        stages = _PROGRAM_BYTES // (2 * block * shape.head_dim * shape.dtype.itemsize)
        self.settings = kernels.Settings(block, stages, _PROGRAMS)
        self._shape, self._few, self._kernels = shape, few, kernels
        self._scale = shape.head_dim**-0.5 * math.log2(math.e)
        self._spans: kernels.Spans | None = None
        self._batch: AttentionBatch

    def for_graph(self, size: int) -> DecodeBackend | None:
        # What a step writes to is the same for all steps, so that every graph can hold on to the same one.
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
        )

    def decode(self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor) -> None:
        batch = self._batch
        if few := self._other(batch.num_decode, batch.num_segments):
            few.decode(layer, kv, q, out)
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
            settings=self.settings,
        )

    def _other(self, rows: int, segments: int = 0) -> DecodeBackend | None:
        # Steps with prompts are launched kernel by kernel, where two tensor maps a launch cost the host more than the
        # device gains.
        return self._few if rows < FEWEST_ROWS or segments else None

    def _allocate(self, page_table: torch.Tensor) -> None:
        """What the largest batch over `page_table` needs."""
        shape, (rows, pages) = self._shape, page_table.shape
        blocks = rows * pages * (shape.page_size // self.settings.block)
        programs = self.settings.programs * torch.cuda.get_device_properties(shape.device).multi_processor_count
        # Their product with the blocks is computed in 32 bits.
        spans = max(1, min(programs // shape.kv_heads, (2**31 - 1) // blocks - 1))

        def numbers(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=shape.device)

        self._spans = self._kernels.Spans(numbers(rows), numbers(blocks), numbers(blocks))
        self._arrivals = numbers(rows, shape.kv_heads)
        sums = (2 * spans, shape.query_heads)
        self._sums = torch.empty(sums, dtype=torch.float32, device=shape.device)
        self._parts = torch.empty((*sums, shape.head_dim), dtype=torch.float32, device=shape.device)
