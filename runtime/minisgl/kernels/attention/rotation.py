"""Rotary position embedding (arXiv:2104.09864) behind an optional norm of each head (Qwen3); reference in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.kernels.pointwise.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Rotation:
    """Head norms and angles that one layer applies to queries and keys before attention."""

    cos_sin: torch.Tensor
    """[T, D] float32: cos of the D / 2 angles of each token's position, then sin."""
    q_gain: torch.Tensor | None = None
    """[D]; if given, each query head is normalized first."""
    k_gain: torch.Tensor | None = None
    """[D]; given if and only if `q_gain` is."""
    eps: float = 0.0
    unit_offset: bool = False
    round_last: bool = False
    """Kind of the norms, see `norm.rms_norm`."""

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize and rotate q [T, Hq, D] and k [T, Hkv, D]. Reference for any device."""
        if self.q_gain is not None and self.k_gain is not None:
            q, k = self._normed(q, self.q_gain), self._normed(k, self.k_gain)
        return rotate(q, self.cos_sin), rotate(k, self.cos_sin)

    def apply_to_queries(self, q: torch.Tensor) -> torch.Tensor:
        """`apply` for queries alone."""
        return rotate(q if self.q_gain is None else self._normed(q, self.q_gain), self.cos_sin)

    def _normed(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, gain, self.eps, unit_offset=self.unit_offset, round_last=self.round_last)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of x [T, H, D] in float32. Returns x's dtype."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
