"""Norms with an output gate, as linear attention and state spaces have them behind their heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def norm_then_gate(heads: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of each head [T, H, size] with `gain` [size], times the SiLU of its gate [T, H · size]. Returns
    [T, H · size] in the type of the gate."""
    if heads.is_cuda:
        from minisgl.kernels.pointwise.gated_norm_triton import gated_norm_cuda

        return gated_norm_cuda(heads, gate, gain, heads.shape[1], eps, gate_first=False)
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result: torch.Tensor = gain * normed.to(gain.dtype) * F.silu(gate.view_as(heads).float())
    return result.to(gate.dtype).flatten(1)


def gate_then_norm(
    heads: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Outputs of heads [T, width] times the SiLU of the gate [T, width], then the norm of each of the `groups` with
    `gain` [width]. Returns [T, width] in the type of the gate."""
    if heads.is_cuda:
        from minisgl.kernels.pointwise.gated_norm_triton import gated_norm_cuda

        return gated_norm_cuda(heads, gate, gain, groups, eps, gate_first=True)
    parts = gated(heads, gate).unflatten(-1, (groups, -1))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    result: torch.Tensor = gain * normed.flatten(1).to(gate.dtype)
    return result


def gated(heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`heads` times the SiLU of `gate` in float32."""
    return heads.float() * F.silu(gate.float())
