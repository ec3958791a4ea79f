# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Weights of 4 bits to bfloat16 on CUDA, for products of many rows, which cuBLAS then computes."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.int4_words import INPUTS, OUTPUTS, PIECE

_PIECE = tl.constexpr(PIECE)
_OUTPUTS = tl.constexpr(OUTPUTS)
_INPUTS = tl.constexpr(INPUTS)


@triton.jit
def _numbers(words, SHIFT: tl.constexpr):
    return (words >> SHIFT & 15).to(tl.int16)


@triton.jit
def _dequantize(words, scales, out, steps, GROUPS: tl.constexpr):
    """One piece: 64 outputs and 128 inputs, in which GROUPS groups follow each other. `int4_words` has the order."""
    block = tl.program_id(0)
    step = tl.program_id(1)
    packed = tl.load(words + (block * steps + step).to(tl.int64) * _PIECE + tl.arange(0, _PIECE))
    low = tl.join(_numbers(packed, 0), _numbers(packed, 16))
    second = tl.join(_numbers(packed, 4), _numbers(packed, 20))
    third = tl.join(_numbers(packed, 8), _numbers(packed, 24))
    high = tl.join(_numbers(packed, 12), _numbers(packed, 28))
    # [8 outputs, output of 8, thread of 4, 32 inputs, bit 0 of the input, bit 3, bit 4]
    numbers = tl.join(tl.join(low, second), tl.join(third, high))
    numbers = tl.permute(tl.reshape(numbers, (8, 8, 4, 4, 2, 2, 2)), (0, 1, 3, 6, 5, 2, 4))
    numbers = tl.reshape(numbers, (_OUTPUTS, GROUPS, _INPUTS // GROUPS)).to(tl.int32)
    n = tl.arange(0, _OUTPUTS)
    groups = tl.arange(0, GROUPS)
    at = (block * steps + step).to(tl.int64) * (GROUPS * _OUTPUTS) + groups[None, :] * _OUTPUTS + n[:, None]
    scale = tl.load(scales + at)[:, :, None]
    shifted = (numbers - (scale & 15)).to(tl.float32)
    weights = tl.reshape(shifted * (scale & -16).to(tl.float32, bitcast=True), (_OUTPUTS, _INPUTS))
    row = (block * _OUTPUTS + n).to(tl.int64) * (steps * _INPUTS)
    tl.store(out + row[:, None] + step * _INPUTS + tl.arange(0, _INPUTS)[None, :], weights.to(out.dtype.element_ty))


def dequantize_words_cuda(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As `int4_words.dequantize_words`."""
    steps = words.shape[1] // PIECE
    assert words.is_contiguous() and scales.is_contiguous()
    out = torch.empty((len(words) * OUTPUTS, steps * INPUTS), dtype=torch.bfloat16, device=words.device)
    _dequantize[(len(words), steps)](words, scales, out, steps, GROUPS=scales.shape[1] // OUTPUTS // steps, num_warps=4)
    return out
