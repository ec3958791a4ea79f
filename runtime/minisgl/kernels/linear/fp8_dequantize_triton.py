"""Weights in FP8 blocks to 16 bits on CUDA, for products that have no kernel for FP8."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.pointwise.fp8_rows import BLOCK


@triton.jit
def _dequantize_blocks(values, scales, out, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program: one block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * INPUTS + column[None, :]
    scale = tl.load(scales + tl.program_id(0) * (INPUTS // BLOCK) + tl.program_id(1))
    tl.store(out + place, (tl.load(values + place).to(tl.float32) * scale).to(out.dtype.element_ty))


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[…, N, K] in FP8 with `scales` […, N / 128, K / 128] in float32, both contiguous, to `dtype`."""
    inputs = values.shape[-1]
    assert values.shape[-2] % BLOCK == 0 and inputs % BLOCK == 0 and values.is_contiguous() and scales.is_contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    _dequantize_blocks[(values.numel() // inputs // BLOCK, inputs // BLOCK)](
        values, scales, out, INPUTS=inputs, BLOCK=BLOCK, num_warps=8
    )
    return out
