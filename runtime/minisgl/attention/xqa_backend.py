"""TensorRT-LLM's XQA decode kernel from flashinfer. It reads block table and lengths on the device, so a step needs no
plan and a captured step can be replayed without host work."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.flashinfer_backend import workspace
from minisgl.kernels.compile.flashinfer_kernels import XqaKernel
from minisgl.kernels.compile.flashinfer_setup import load_flashinfer, why_not_flashinfer

_PAGE_SIZES = (16, 32, 64, 128)


def why_not(shape: AttentionShape) -> str | None:
    """Reason why this kernel cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.softcap is not None:
        return "it does not bound scores"
    if shape.sinks:
        return "it has no sinks"
    if shape.stored_dtype != shape.dtype:
        return "it reads no FP8 KV cache"
    if torch.cuda.get_device_capability(shape.device)[0] not in (9, 10, 12):
        return "it needs a Hopper or Blackwell GPU"
    if shape.page_size not in _PAGE_SIZES:
        return f"it serves pages of 16, 32, 64 or 128 tokens, not {shape.page_size}"
    if shape.head_dim % 16 or shape.head_dim > 256:
        return f"it serves head sizes that are multiples of 16 up to 256, not {shape.head_dim}"
    window = shape.window is not None
    return why_not_flashinfer(XqaKernel(shape.dtype, shape.page_size, shape.head_dim, shape.group, window))


class XqaDecode:
    name = "xqa"

    def __init__(self, shape: AttentionShape, *, share: XqaDecode | None = None) -> None:
        self._shape = shape
        self._workspace: torch.Tensor = workspace(shape) if share is None else share._workspace
        self._run: Any = load_flashinfer().decode.xqa_batch_decode_with_kv_cache
        self._block_tables: torch.Tensor
        self._lengths: torch.Tensor

    def for_graph(self, size: int) -> XqaDecode:
        return XqaDecode(self._shape, share=self)

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing: this backend plans nothing on the host."""

    def begin(self, batch: AttentionBatch) -> None:
        if self._shape.window is None:
            self._block_tables, self._lengths = batch.page_table[batch.decode_slots], batch.decode_lengths
        else:
            self._block_tables, self._lengths = tables_in_window(batch, self._shape.window, self._shape.page_size)

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        self._run(
            q.contiguous(),
            (kv.keys[layer], kv.values[layer]),
            self._workspace,
            self._block_tables,
            self._lengths,
            self._block_tables.shape[1] * self._shape.page_size,
            bmm1_scale=self._shape.score_scale,
            bmm2_scale=1.0,
            window_left=-1 if self._shape.window is None else self._shape.window - 1,
            kv_layout="NHD",
            out=out,
        )

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        return self.name


def tables_in_window(batch: AttentionBatch, window: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page tables [D, pages] of the decode rows from the page on in which their windows begin, and the lengths [D] of
    their contexts from there on. The kernel loads whole tiles, and pages behind a window are not the row's any more."""
    table, lengths = batch.page_table, batch.decode_lengths
    pages = min((window - 1) // page_size + 2, table.shape[1])
    skipped = (lengths - window).clamp(min=0) // page_size
    index = skipped[:, None] + torch.arange(pages, dtype=torch.int32, device=table.device)
    return table[batch.decode_slots[:, None], index.clamp(max=table.shape[1] - 1)], lengths - skipped * page_size
