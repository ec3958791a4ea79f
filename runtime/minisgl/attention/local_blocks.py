"""Attention within a window, in blocks of a whole step as long as the window: each attends to itself and to its
neighbours, whatever sequences they belong to, and a mask does the rest (arXiv:2004.05150)."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from minisgl.attention.packed_shape import PackedShape
from minisgl.attention.reference import attend

_LEAST_BLOCK: Final = 64


class LocalBlocks:
    """Blocks of one step."""

    def __init__(self, offsets: torch.Tensor, tokens: int, window: int, *, causal: bool) -> None:
        """`offsets` [S + 1]: as in `PackedAttention.begin`; `tokens`: of all sequences."""
        self._block = block = max(window - 1, _LEAST_BLOCK)
        self._tokens = tokens
        self._count = count = -(-tokens // block)
        self._blocks = 2 if causal else 3
        sequences = torch.repeat_interleave(offsets.diff(), output_size=tokens)
        # Padding is a sequence of its own, so that each query has a key.
        padded = F.pad(sequences, (block, (count + self._blocks - 2) * block - tokens), value=-1)
        keys = padded.unfold(0, self._blocks * block, block)
        queries = padded[block : (count + 1) * block].view(count, block)
        own = torch.arange(block, 2 * block, device=offsets.device)[:, None]
        distance = own - torch.arange(self._blocks * block, device=offsets.device)
        near = (distance < window) & (distance >= (0 if causal else 1 - window))
        self._mask = ((queries[:, :, None] == keys[:, None]) & near)[:, None]

    def attend(
        self, shape: PackedShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D]."""
        block, end = self._block, self._count * self._block - self._tokens
        queries = F.pad(q, (0, 0, 0, 0, 0, end)).unflatten(0, (self._count, block)).transpose(1, 2)
        keys, values = (
            F.pad(part, (0, 0, 0, 0, block, end + (self._blocks - 2) * block))
            .unfold(0, self._blocks * block, block)
            .transpose(2, 3)
            for part in (k, v)
        )
        if k.is_cuda and q.shape[1] != k.shape[1]:
            # Torch's fast kernels take no groups of heads beside a mask.
            keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (keys, values))
        attended = attend(
            queries,
            keys,
            values,
            self._mask,
            scale=shape.scale,
            softcap=shape.softcap,
            sinks=None if sinks is None else sinks[:, None],
        )
        return attended.transpose(1, 2).flatten(0, 1)[: self._tokens]
