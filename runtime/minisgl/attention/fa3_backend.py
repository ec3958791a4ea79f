"""FlashAttention-3 (arXiv:2407.08608) for segments, from the fa3-fwd package.

The package reads paged keys only in whole tiles: pages of a multiple of 128 tokens, and enough query rows to fill a
tile. Segments that begin at position 0 need no pages: they attend to the keys of the step itself. In other steps, all
segments up to the last one with a prefix use the fallback.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from minisgl.attention.backend import AttentionShape, PrefillBackend
from minisgl.attention.batch import AttentionBatch, PagedKV

_TILE_ROWS = 128


def why_not(shape: AttentionShape) -> str | None:
    """Reason why this kernel cannot serve `shape`, or None."""
    if shape.device.type != "cuda":
        return "it needs a CUDA device"
    if shape.window is not None:
        return "it does not support a sliding window"
    if torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "it needs a Hopper GPU"
    if shape.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in (64, 96, 128, 192, 256):
        return f"it has kernels for head sizes 64, 96, 128, 192 and 256, not {shape.head_dim}"
    try:
        importlib.import_module("fa3_fwd_interface")
    except (ImportError, OSError) as error:
        return f"fa3-fwd cannot be imported ({error}); install the cuda extra"
    return None


class Fa3Prefill:
    name = "fa3"

    def __init__(self, shape: AttentionShape, fallback: PrefillBackend) -> None:
        self._shape = shape
        self._fallback = fallback
        self._fa3: Any = importlib.import_module("fa3_fwd_interface")
        self._batch: AttentionBatch
        self._paged = False
        self._longest = 0
        self._split = 0
        """Index of the first segment that does not use the fallback."""
        self._split_tokens = 0
        """Tokens of the segments that use the fallback."""

    def prepare(self, batch: AttentionBatch) -> None:
        lengths, continued = batch.host_prefill_lengths, np.flatnonzero(batch.host_prefill_starts)
        self._paged = bool(
            len(continued)
            and self._shape.page_size % _TILE_ROWS == 0
            and int(np.max(lengths)) * self._shape.group > _TILE_ROWS
        )
        # Continued prompts come before new ones: segments behind the last continued one need no pages.
        self._split = 0 if self._paged or not len(continued) else int(continued[-1]) + 1
        self._split_tokens = int(lengths[: self._split].sum())
        self._longest = int(np.max(lengths[self._split :], initial=0))
        if self._split:
            self._fallback.prepare(_first_segments(batch, self._split))

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._offsets = batch.query_offsets
        if self._split:
            self._fallback.begin(_first_segments(batch, self._split))
            self._offsets = batch.query_offsets[self._split :] - self._split_tokens
        elif self._paged:
            self._block_tables = batch.page_table[batch.prefill_slots]
            page = self._shape.page_size
            last = batch.prefill_kv_lengths - 1
            self._last_pages = self._block_tables.gather(1, (last // page).long()[:, None])[:, 0]
            offsets = torch.arange(page, device=last.device)
            self._beyond = (offsets > (last % page)[:, None])[..., None, None]

    def prefill(
        self, layer: int, kv: PagedKV, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        offsets, longest = self._offsets, self._longest
        if self._paged:
            # The kernel reads whole tiles, and a weight of 0 does not remove a value that is not finite: values that an
            # earlier owner left behind the end of a segment must not reach it. The segment owns the page.
            values = kv.values[layer]
            values[self._last_pages] = values[self._last_pages].masked_fill(self._beyond, 0)
            out.copy_(
                self._fa3.flash_attn_with_kvcache(
                    q,
                    kv.keys[layer],
                    values,
                    cache_seqlens=self._batch.prefill_kv_lengths,
                    page_table=self._block_tables,
                    cu_seqlens_q=offsets,
                    max_seqlen_q=longest,
                    softmax_scale=self._shape.head_dim**-0.5,
                    causal=True,
                )
            )
            return
        if split := self._split_tokens:
            self._fallback.prefill(layer, kv, q[:split], k[:split], v[:split], out[:split])
            q, k, v, out = q[split:], k[split:], v[split:], out[split:]
        if longest:
            out.copy_(self._fa3.flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True))

    def backend_for(self, *, prefix: bool) -> str:
        paged = self._shape.page_size % _TILE_ROWS == 0
        return self._fallback.backend_for(prefix=True) if prefix and not paged else self.name


def _first_segments(batch: AttentionBatch, count: int) -> AttentionBatch:
    return replace(
        batch,
        prefill_slots=batch.prefill_slots[:count],
        query_offsets=batch.query_offsets[: count + 1],
        prefill_kv_lengths=batch.prefill_kv_lengths[:count],
        host_prefill_starts=batch.host_prefill_starts[:count],
        host_prefill_lengths=batch.host_prefill_lengths[:count],
    )
