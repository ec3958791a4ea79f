"""flashinfer's FA2 kernels over the paged pool (arXiv:2501.01005), for decode rows and for segments.

Each step is planned once on the host, from the host's copy of the lengths; page numbers are gathered on the device. A
plan is copied to the device from pinned memory that the next plan overwrites, so planning waits for that copy. At most
two steps are in flight, so the copy has finished by then.

With a window, the pages of a sequence begin with the one in which the window of its first query vector begins: those
before it are not the sequence's any more, and the kernels load whole tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.kernels.compile.flashinfer_kernels import PagedPrefillKernel
from minisgl.kernels.compile.flashinfer_setup import load_flashinfer, why_not_flashinfer
from minisgl.wire.plan import IntArray

_WORKSPACE_BYTES = 128 << 20


def why_not(shape: AttentionShape) -> str | None:
    """Reason why these kernels cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.stored_dtype != shape.dtype:
        return "it reads no FP8 KV cache"
    if shape.head_dim not in (64, 128, 256):
        return f"it has kernels for head sizes 64, 128 and 256, not {shape.head_dim}"
    kernel = PagedPrefillKernel(shape.dtype, shape.head_dim, shape.window is not None, shape.softcap is not None)
    return why_not_flashinfer(kernel)


def workspace(shape: AttentionShape) -> torch.Tensor:
    """Scratch memory that a kernel uses within one call, zeroed because some kernels require that at first use."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)


def _attend(
    wrapper: Any, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    pools = kv.keys[layer], kv.values[layer]
    if sinks is None:
        wrapper.run(q, pools, out=out)
        return
    from minisgl.kernels.attention.sinks_triton import scale_by_share

    _, sums = wrapper.run(q, pools, out=out, return_lse=True)
    scale_by_share(out, sums, sinks, natural=False)


class FlashInferDecode:
    name = "flashinfer"

    def __init__(
        self, shape: AttentionShape, *, size: int | None = None, share: FlashInferDecode | None = None
    ) -> None:
        """`size`: a fixed number of rows, in buffers that a CUDA graph may capture. `share`: use its workspace; the two
        never run at the same time."""
        self._shape = shape
        self._workspace: torch.Tensor = workspace(shape) if share is None else share._workspace
        self._copied = torch.cuda.Event()
        buffers: dict[str, Any] = {}
        if size is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": _int32(size + 1, shape),
                "paged_kv_indices_buffer": _int32(size * shape.pages_per_row, shape),
                "paged_kv_last_page_len_buffer": _int32(size, shape),
            }
        # The tensor-core kernel serves every number of query heads per KV head; it is the prefill kernel.
        self._wrapper: Any = load_flashinfer().decode.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **buffers
        )

    def for_graph(self, size: int) -> FlashInferDecode:
        return FlashInferDecode(self._shape, size=size, share=self)

    def prepare(self, batch: AttentionBatch) -> None:
        shape = self._shape
        lengths, host_lengths = batch.decode_lengths, batch.host_decode_lengths
        offsets, last = _page_offsets(shape, host_lengths, host_lengths - 1)
        pages = _pages(shape, batch.page_table, batch.decode_slots, lengths, lengths - 1, int(offsets[-1]))
        self._copied.synchronize()
        self._wrapper.plan(
            torch.from_numpy(offsets),
            pages,
            torch.from_numpy(last),
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=_window_left(shape),
            sm_scale=shape.score_scale,
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._copied.record()

    def begin(self, batch: AttentionBatch) -> None:
        """Do nothing: `prepare` has planned everything."""

    def decode(
        self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        _attend(self._wrapper, layer, kv, q, out, sinks)

    def backend_for(self, rows: int, *, mixed: bool) -> str:
        return self.name


class FlashInferPrefill:
    name = "flashinfer"
    most_graph_keys = 0

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._copied = torch.cuda.Event()
        self._wrapper: Any = load_flashinfer().prefill.BatchPrefillWithPagedKVCacheWrapper(
            workspace(shape), "NHD", backend="fa2"
        )

    def for_graph(self, tokens: int, segments: int, *, prefix: bool) -> None:
        """Return None: the work of a step follows from lengths on the host."""
        return

    def prepare(self, batch: AttentionBatch) -> None:
        shape = self._shape
        starts, ends = batch.host_prefill_starts, batch.prefill_kv_lengths
        offsets, last = _page_offsets(shape, starts + batch.host_prefill_lengths, starts)
        queries = np.zeros(batch.num_segments + 1, np.int32)
        np.cumsum(batch.host_prefill_lengths, out=queries[1:])
        first = ends - batch.query_offsets.diff()
        pages = _pages(shape, batch.page_table, batch.prefill_slots, ends, first, int(offsets[-1]))
        self._copied.synchronize()
        self._wrapper.plan(
            torch.from_numpy(queries),
            torch.from_numpy(offsets),
            pages,
            torch.from_numpy(last),
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            window_left=_window_left(shape),
            sm_scale=shape.score_scale,
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._copied.record()

    def begin(self, batch: AttentionBatch) -> None:
        """Do nothing: `prepare` has planned everything."""

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
        _attend(self._wrapper, layer, kv, q, out, sinks)

    def backend_for(self, *, prefix: bool) -> str:
        return self.name


def _window_left(shape: AttentionShape) -> int:
    """Tokens before its own that a token attends to; −1: all."""
    return -1 if shape.window is None else shape.window - 1


def _int32(size: int, shape: AttentionShape) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=shape.device)


def _pages_behind(shape: AttentionShape, first: IntArray) -> IntArray | int:
    """Pages of sequences behind the window of their first query vectors, which are at `first` [n]."""
    if shape.window is None:
        return 0
    return np.maximum(first - (shape.window - 1), 0) // shape.page_size


def _page_offsets(shape: AttentionShape, lengths: IntArray, first: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets [n + 1] of each sequence in the list of all pages, and the tokens in its last page [n]. `first`: see
    `_pages_behind`."""
    counts = -(-lengths // shape.page_size)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts - _pages_behind(shape, first), out=offsets[1:])
    return offsets, (lengths - (counts - 1) * shape.page_size).astype(np.int32)


def _pages(
    shape: AttentionShape,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
    total: int,
) -> torch.Tensor:
    """Pages [total] of all sequences that are not behind their windows, concatenated, int32. The total is known on the
    host."""
    counts = (lengths + (shape.page_size - 1)) // shape.page_size
    if shape.window is None:
        rows = torch.repeat_interleave(counts, output_size=total)
        begins = counts.cumsum(0) - counts
    else:
        skipped = (first - (shape.window - 1)).clamp(min=0) // shape.page_size
        counts = counts - skipped
        rows = torch.repeat_interleave(counts, output_size=total)
        begins = counts.cumsum(0) - counts - skipped
    index = torch.arange(total, device=slots.device) - begins[rows]
    return page_table[slots[rows], index]
