"""Quantization of activations to FP8."""

from __future__ import annotations

import torch

from minisgl.kernels.fp8_rows import BLOCK, E4M3_MAX, SMALLEST, Fp8Rows, new_fp8_rows


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Quantize [T, K] of any float type; the largest value of each 128 inputs becomes 448."""
    if x.is_cuda:
        from minisgl.kernels.fp8_rows_triton import quantize_rows_cuda

        return quantize_rows_cuda(x)
    count, inputs = x.shape
    out = new_fp8_rows(count, inputs, x.device)
    blocks = x.float().view(count, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax(2).clamp(min=SMALLEST) / E4M3_MAX
    out.scales[:, :count] = scales.T
    out.values[:count] = (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(count, inputs)
    return out
