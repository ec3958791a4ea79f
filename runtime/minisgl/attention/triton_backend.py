"""Prompts by our own kernel, see `kernels/attention/prefill_triton.py`. All of its work is on the device."""

from __future__ import annotations

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV


def why_not(shape: AttentionShape) -> str | None:
    """Reason why the kernel cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "it needs a Hopper GPU"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in (64, 128, 256, 512):
        return f"it serves head sizes 64, 128, 256 and 512, not {shape.head_dim}"
    if shape.page_size not in (16, 32) and shape.page_size % 64:
        return f"it serves pages of 16, 32 or a multiple of 64 tokens, not {shape.page_size}"
    return None


class TritonPrefill:
    name = "triton"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._batch: AttentionBatch | None = None

    @property
    def most_graph_keys(self) -> int:
        """The longest sequence: keys are read from their pages."""
        return self._shape.pages_per_row * self._shape.page_size

    def for_graph(self, tokens: int, segments: int, *, prefix: bool) -> TritonPrefill:
        return TritonPrefill(self._shape)

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing: this backend plans nothing on the host."""

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch

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
        from minisgl.kernels.attention.prefill_triton import Segments, attend_paged

        batch = self._batch
        assert batch is not None
        attend_paged(
            q,
            kv.keys[layer],
            kv.values[layer],
            out,
            Segments(batch.page_table, batch.prefill_slots, batch.query_offsets, batch.prefill_kv_lengths),
            sinks,
            scale=self._shape.score_scale,
            scales=kv.scales[layer],
            window=self._shape.window,
            softcap=self._shape.softcap,
        )

    def backend_for(self, *, prefix: bool) -> str:
        return self.name
