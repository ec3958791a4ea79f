"""Convolution over time that looks back at a few tokens, in torch: reference, and implementation on CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def convolve_rows(
    x: torch.Tensor,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool,
) -> torch.Tensor:
    """The next token of N sequences: x [N, C], behind the inputs [places, K − 1, C] at `slots` [N] int64, which become
    the last ones. Returns [N, C]."""
    if x.is_cuda:
        from minisgl.kernels.attention.recurrent_decode_triton import convolve_rows_cuda

        return convolve_rows_cuda(x, inputs, slots, weight, bias, silu=silu)
    out, inputs[slots] = convolve(x[:, None], inputs[slots], weight, bias, silu=silu)
    return out[:, 0]


def convolve(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution of each channel: x [N, T, C] behind `before` [N, K − 1, C], with weight [C, K] and bias [C]; `silu`:
    the activation follows. Returns [N, T, C], and the last K − 1 inputs."""
    inputs = torch.cat((before, x), dim=1)
    size = weight.shape[1]
    summed = sum(inputs[:, i : i + x.shape[1]].float() * weight[:, i].float() for i in range(size))
    assert isinstance(summed, torch.Tensor)
    if bias is not None:
        summed = summed + bias.float()
    return (F.silu(summed) if silu else summed).to(x.dtype), inputs[:, inputs.shape[1] - (size - 1) :]
