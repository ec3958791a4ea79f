"""Queries and keys made ready for attention: a norm of each head, as in Qwen3, rotation by the position, and the way
of keys and values to the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Rotation:
    """What queries and keys of one layer still want before they meet."""

    cos_sin: torch.Tensor
    """[T, D] float32: cos of the D / 2 angles of each token's position, then sin."""
    q_gain: torch.Tensor | None = None
    """[D]; with it each query head is normalized first."""
    k_gain: torch.Tensor | None = None
    """[D]; where there is a `q_gain`."""
    eps: float = 0.0

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, Hq, D] and [T, Hkv, D] to the same, normalized and rotated. The reference, on any device."""
        if self.q_gain is not None and self.k_gain is not None:
            q, k = rms_norm(q, self.q_gain, self.eps), rms_norm(k, self.k_gain, self.eps)
        return rotate(q, self.cos_sin), rotate(k, self.cos_sin)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of [T, H, D]; in float32, returned in x's dtype."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    locations: torch.Tensor,
    kept_from: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store k, rotated, and v [T, Hkv, D] in `keys` and `values` [pages, page_size, Hkv, D] of one layer, at
    `locations` [T] int64, all different but for those in the dummy page. The last two dimensions of q, k and v are
    contiguous.

    Returns q [T, Hq, D], rotated, and the rotated keys of the tokens from `kept_from` on, [T − kept_from, Hkv, D].
    """
    if q.is_cuda:
        from minisgl.kernels.rotary_triton import rotate_and_store_cuda

        return rotate_and_store_cuda(q, k, v, rotation, keys, values, locations, kept_from)
    q, k = rotation.apply(q, k)
    keys.flatten(0, 1).index_copy_(0, locations, k)
    values.flatten(0, 1).index_copy_(0, locations, v)
    return q, k[kept_from:]
