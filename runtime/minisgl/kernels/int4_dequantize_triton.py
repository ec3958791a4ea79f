# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Weights of 4 bits to bfloat16 on CUDA, for products of many rows, which cuBLAS then computes."""

import torch
import triton
import triton.language as tl


@triton.jit
def _numbers(words, SHIFT: tl.constexpr):
    return (words >> SHIFT & 15).to(tl.int16)


@triton.jit
def _dequantize(words, scales, out, outputs, inputs, GROUP: tl.constexpr):
    """64 outputs and 128 inputs. `int4_words` has the order of the weights."""
    half = tl.program_id(0)
    tile = (half // 2 * (inputs // 128) + tl.program_id(1)) * 2 + half % 2
    packed = tl.load(words + tile.to(tl.int64) * 1024 + tl.arange(0, 1024))
    low = tl.join(_numbers(packed, 0), _numbers(packed, 16))
    second = tl.join(_numbers(packed, 4), _numbers(packed, 20))
    third = tl.join(_numbers(packed, 8), _numbers(packed, 24))
    high = tl.join(_numbers(packed, 12), _numbers(packed, 28))
    # [warp, row of 8, thread of 4, 8 rows of 16, 32 inputs, bit 0 of the input, bit 3, bit 4]
    numbers = tl.join(tl.join(low, second), tl.join(third, high))
    numbers = tl.permute(tl.reshape(numbers, (4, 8, 4, 2, 4, 2, 2, 2)), (0, 3, 1, 4, 7, 6, 2, 5))
    numbers = tl.reshape(numbers, (64, 128)).to(tl.int32)
    n = half * 64 + tl.arange(0, 64)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    pair = tl.load(scales + (k // GROUP)[None, :] * outputs + n[:, None])
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero = (pair & -65536).to(tl.float32, bitcast=True).to(tl.int32) - 128
    weights = ((numbers - zero).to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + n[:, None].to(tl.int64) * inputs + k[None, :], weights)


def dequantize_words_cuda(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As `int4_words.dequantize_words`."""
    outputs, inputs = scales.shape[1], words.shape[1] // 16
    assert words.is_contiguous() and scales.is_contiguous()
    out = torch.empty((outputs, inputs), dtype=torch.bfloat16, device=words.device)
    _dequantize[(outputs // 64, inputs // 128)](
        words, scales, out, outputs, inputs, GROUP=inputs // len(scales), num_warps=4
    )
    return out
