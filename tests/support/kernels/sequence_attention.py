"""Attention without a KV pool, for tests of models alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minisgl.kernels.attention.rotation import Rotation


class SequenceAttention:
    """Causal attention over whole sequences that lie one after the other in the batch."""

    def __init__(self, lengths: Sequence[int], window: int | None = None) -> None:
        """`window`: last positions that a token attends to; None: all."""
        self._lengths = list(lengths)
        self._window = window

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q, k = rotation.apply(q, k)
        outputs = []
        parts = zip(*(torch.split(tensor, self._lengths) for tensor in (q, k, v)), strict=True)
        for query, key, value in parts:
            q_heads, k_heads, v_heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            positions = torch.arange(len(query), device=q.device)
            distances = positions[:, None] - positions
            mask = (distances >= 0) & (distances < (self._window or len(query)))
            out = F.scaled_dot_product_attention(q_heads, k_heads, v_heads, attn_mask=mask, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)
