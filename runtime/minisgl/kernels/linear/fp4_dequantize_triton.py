"""Weights of MXFP4 to bfloat16 on CUDA, for products of many rows."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.linear.fp4_packed import BLOCK, SHIFT, steps_of
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS

# Functions that kernels of another file share name no constants of this module: see `int4_dequantize_triton`.
assert (OUTPUTS, INPUTS, BLOCK, SHIFT) == (64, 128, 32, 126)


@triton.jit
def _numbers(words, CODE: tl.constexpr, HALF: tl.constexpr):
    """One code of a half of each word, as a bfloat16 that is 2^-126 times its value: see `fp4_packed`."""
    half = words >> 16 if HALF else words
    if CODE == 3:
        bits = ((half << 1) & 0x8000) | ((half >> 3) & 0x0180) | ((half >> 7) & 0x0040)
    else:
        bits = (half << (3 * CODE)) & 0x81C0
    return bits.to(tl.int16)


@triton.jit
def load_fp4_piece(words, scales, piece):
    """Load a piece: weights [64 outputs, 128 inputs] in float32. `piece`: its number, int64."""
    packed = tl.load(words + piece * 1024 + tl.arange(0, 1024))
    low = tl.join(_numbers(packed, 0, 0), _numbers(packed, 0, 1))
    second = tl.join(_numbers(packed, 1, 0), _numbers(packed, 1, 1))
    third = tl.join(_numbers(packed, 2, 0), _numbers(packed, 2, 1))
    high = tl.join(_numbers(packed, 3, 0), _numbers(packed, 3, 1))
    # As in `load_piece` of weights in INT4.
    numbers = tl.join(tl.join(low, second), tl.join(third, high))
    numbers = tl.permute(tl.reshape(numbers, (8, 8, 4, 4, 2, 2, 2)), (0, 1, 3, 6, 5, 2, 4))
    # A bfloat16 is the upper half of a float32.
    values = (tl.reshape(numbers, (64, 4, 32)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    at = piece * 256 + tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    exponent = tl.load(scales + at).to(tl.int32)
    return tl.reshape(values * (exponent << 23).to(tl.float32, bitcast=True)[:, :, None], (64, 128))


@triton.jit
def _dequantize(words, scales, out, steps, inputs):
    """Each program: one piece."""
    block = tl.program_id(0)
    step = tl.program_id(1)
    weights = load_fp4_piece(words, scales, (block * steps + step).to(tl.int64))
    row = (block * 64 + tl.arange(0, 64)).to(tl.int64) * inputs
    column = step * 128 + tl.arange(0, 128)
    tl.store(out + row[:, None] + column[None, :], weights.to(out.dtype.element_ty), (column < inputs)[None, :])


def dequantize_fp4_cuda(words: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """As `fp4_packed.dequantize_fp4`, the first `inputs` columns in bfloat16."""
    assert words.is_contiguous() and scales.is_contiguous()
    out = torch.empty((len(words) * OUTPUTS, inputs), dtype=torch.bfloat16, device=words.device)
    _dequantize[(len(words), steps_of(words))](words, scales, out, steps_of(words), inputs, num_warps=4)
    return out
