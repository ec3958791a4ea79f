"""Layer normalization (Ba et al., arXiv:1607.06450)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of x + residual, x + residual); inputs and outputs [T, hidden]. Without a residual `x` is the sum.
    The sum may overwrite `x`."""
    if x.is_cuda:
        from minisgl.kernels.pointwise.layer_norm_triton import layer_norm_cuda

        return layer_norm_cuda(x, residual, gain, bias, eps), x
    total = x if residual is None else x.add_(residual)
    return F.layer_norm(total, gain.shape, gain, bias, eps), total
