"""Gates by a sigmoid: of the outputs of attention, and of a shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def open_heads(heads: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Outputs of heads [T, H · D] times the sigmoid of `gates` [T, H, D]."""
    if heads.is_cuda:
        from minisgl.kernels.pointwise.output_gate_triton import open_heads_cuda

        return open_heads_cuda(heads, gates)
    return heads * torch.sigmoid(gates.flatten(1))


def add_gated(total: torch.Tensor, part: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`total` plus `part`, both [T, n], times the sigmoid of the product of each row of x [T, hidden] with `gate`
    [1, hidden]."""
    if x.is_cuda:
        from minisgl.kernels.pointwise.output_gate_triton import add_gated_cuda

        return add_gated_cuda(total, part, x, gate)
    return total + torch.sigmoid(F.linear(x, gate)) * part
