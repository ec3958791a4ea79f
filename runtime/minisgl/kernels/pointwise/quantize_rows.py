"""Quantization of activations to FP8."""

from __future__ import annotations

import torch

from minisgl.kernels.pointwise.fp8_rows import E4M3_MAX, SMALLEST, Fp8Rows, new_fp8_rows


def quantize_rows(x: torch.Tensor, *, per_row: bool = False) -> Fp8Rows:
    """Quantize [T, K] of any float type; the largest value of each 128 inputs, or of each row, becomes 448."""
    if x.is_cuda:
        from minisgl.kernels.pointwise.quantize_rows_triton import quantize_rows_cuda

        return quantize_rows_cuda(x, per_row=per_row)
    count, inputs = x.shape
    out = new_fp8_rows(count, inputs, x.device, per_row=per_row)
    blocks = x.float().reshape(count, len(out.scales), -1) if count else x.new_empty(0, len(out.scales), 1).float()
    largest = blocks.abs().amax(2).clamp(min=SMALLEST)
    out.scales[:, :count] = (largest / E4M3_MAX).T
    # Not a number by a tensor: torch computes that with a reciprocal, which is rounded once more.
    inverse = torch.full_like(largest, E4M3_MAX) / largest
    out.values[:count] = (blocks * inverse[..., None]).to(torch.float8_e4m3fn).view(count, inputs)
    return out
