"""Attention in float32 with rounded keys and values, for contexts of any length, as the reference of KV caches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import FP8, as_stored

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Rounds keys or values [T, Hkv, D] float32."""
RoundedKV = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Layer, its keys, behind the rotation, and values to what a KV cache keeps of them."""

_QUERIES = 256
"""Queries that are computed at once: their scores for 65,536 keys and 4 heads take 256 MiB."""


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return as_stored(x, FP8, 1.0).float()


def e5m2(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e5m2).float()


def two_bits(x: torch.Tensor) -> torch.Tensor:
    """Four numbers between the smallest and the largest of each head, in equal steps."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / 3).clamp(min=1e-9)
    return low + ((x - low) / step).round() * step


def rounded(keys: Rounding, values: Rounding) -> RoundedKV:
    return lambda layer, k, v: (keys(k), values(v))


class RoundedKVAttention:
    """Causal attention of one sequence. Implements `Attention`."""

    def __init__(self, kv: RoundedKV) -> None:
        self._kv = kv

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and sinks is None
        q, k = rotation.apply(q, k)
        k, v = self._kv(layer, k, v)
        queries = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
        out = torch.empty_like(queries)
        for first in range(0, len(q), _QUERIES):
            last = min(first + _QUERIES, len(q))
            scores = torch.einsum("qhgd,khd->hgqk", queries[first:last], k[:last])
            positions = torch.arange(last, device=q.device)
            scores.masked_fill_(positions > positions[first:, None], float("-inf"))
            out[first:last] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v[:last])
        return out.flatten(1)
