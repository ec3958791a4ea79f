"""Weights of 4 bits, and experts in FP8, to 16 bits on CUDA, for products of many rows, which cuBLAS then computes."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece
from minisgl.kernels.pointwise.fp8_rows import BLOCK

# Functions that kernels of another file share name no constants of this module: Triton leaves those out of the names of
# some of the kernels.
assert (OUTPUTS, INPUTS, PIECE) == (64, 128, 1024)


@triton.jit
def _numbers(words, SHIFT: tl.constexpr):
    return (words >> SHIFT & 15).to(tl.int16)


@triton.jit
def load_piece(words, scales, piece, GROUPS: tl.constexpr):
    """Load a piece, in which GROUPS groups of inputs follow each other: weights [64 outputs, 128 inputs] in float32.
    `int4_packed` has the order. `piece`: its number, int64."""
    packed = tl.load(words + piece * 1024 + tl.arange(0, 1024))
    low = tl.join(_numbers(packed, 0), _numbers(packed, 16))
    second = tl.join(_numbers(packed, 4), _numbers(packed, 20))
    third = tl.join(_numbers(packed, 8), _numbers(packed, 24))
    high = tl.join(_numbers(packed, 12), _numbers(packed, 28))
    # [8 outputs, output of 8, thread of 4, 32 inputs, bit 0 of the input, bit 3, bit 4]
    numbers = tl.join(tl.join(low, second), tl.join(third, high))
    numbers = tl.permute(tl.reshape(numbers, (8, 8, 4, 4, 2, 2, 2)), (0, 1, 3, 6, 5, 2, 4))
    numbers = tl.reshape(numbers, (64, GROUPS, 128 // GROUPS)).to(tl.int32)
    n = tl.arange(0, 64)
    groups = tl.arange(0, GROUPS)
    at = piece * (GROUPS * 64) + groups[None, :] * 64 + n[:, None]
    scale = tl.load(scales + at)[:, :, None]
    shifted = (numbers - (scale & 15)).to(tl.float32)
    return tl.reshape(shifted * (scale & -16).to(tl.float32, bitcast=True), (64, 128))


@triton.jit
def _dequantize(words, scales, out, steps, GROUPS: tl.constexpr):
    """Each program: one piece."""
    block = tl.program_id(0)
    step = tl.program_id(1)
    weights = load_piece(words, scales, (block * steps + step).to(tl.int64), GROUPS)
    row = (block * 64 + tl.arange(0, 64)).to(tl.int64) * (steps * 128)
    tl.store(out + row[:, None] + step * 128 + tl.arange(0, 128)[None, :], weights.to(out.dtype.element_ty))


def dequantize_words_cuda(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As `int4_packed.dequantize_words`."""
    steps = words.shape[1] // PIECE
    assert words.is_contiguous() and scales.is_contiguous()
    out = torch.empty((len(words) * OUTPUTS, steps * INPUTS), dtype=torch.bfloat16, device=words.device)
    _dequantize[(len(words), steps)](words, scales, out, steps, GROUPS=groups_in_piece(words, scales), num_warps=4)
    return out


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
