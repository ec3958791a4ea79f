"""Layer normalization (Ba et al., arXiv:1607.06450), and that by the root mean square (Zhang & Sennrich,
arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, unit_offset: bool = False, round_last: bool = False
) -> torch.Tensor:
    """Normalize the last dimension; the mean square is computed in float32 for any dtype of `x`. `weight`: None for a
    gain of 1. `unit_offset`: the gain is 1 + `weight`; `round_last`: it is applied in float32, see
    `layers.norm_config`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if not round_last:
        assert not unit_offset
        return weight * normed.to(x.dtype)
    gain = 1.0 + weight.float() if unit_offset else weight.float()
    return (normed * gain).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    round_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of x + residual, x + residual); inputs and outputs [T, hidden]. Without a residual `x` is the sum.
    On CUDA the sum overwrites `residual`, and `x` may be partial sums, [parts, T, hidden] in float32."""
    if x.is_cuda:
        from minisgl.kernels.pointwise.norm_triton import rms_norm_cuda

        normed = rms_norm_cuda(x, residual, weight, eps, unit_offset=unit_offset, round_last=round_last)
        return normed, x if residual is None else residual
    residual = x if residual is None else residual + x
    return rms_norm(residual, weight, eps, unit_offset=unit_offset, round_last=round_last), residual


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (layer norm of x + residual, x + residual); inputs and outputs [T, hidden]. Without a residual `x` is the
    sum. The sum may overwrite `x`."""
    if x.is_cuda:
        from minisgl.kernels.pointwise.layer_norm_triton import layer_norm_cuda

        return layer_norm_cuda(x, residual, gain, bias, eps), x
    total = x if residual is None else x.add_(residual)
    return F.layer_norm(total, gain.shape, gain, bias, eps), total
