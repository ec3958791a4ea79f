"""What a model layer sees of attention."""

from __future__ import annotations

from typing import Protocol

import torch


class Attention(Protocol):
    """Bound to one step's batch: which token belongs to which sequence is known here and nowhere in a model."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store `k`, `v` [T, Hkv, D] (after RoPE) in the KV pool, then attend causally with `q` [T, Hq, D].

        T tokens in the order of the step: decode rows first, then the prefill segments one after the other.
        Returns [T, Hq * D] in q's dtype.
        """
        ...
