"""Weights of 4 bits, eight in a word of 32 bits, in the order in which the tensor cores read them.

64 outputs and 128 inputs are 1,024 words in one piece: for each of 4 warps and 32 threads, 8 words of the weights that
this thread multiplies. The pieces of 128 outputs follow each other. Thread 4 g + c of warp w has outputs 16 w + g and
16 w + g + 8; of each 8 inputs it has 2 c and 2 c + 1. A word has those of 32 inputs; two neighbouring inputs are 16
bits apart, so that one operation takes them out together."""

from __future__ import annotations

from typing import Final

import torch

WORD: Final = 8
"""Weights in a word."""
SHIFTS: Final = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bits at which a word has the weights of inputs 0, 1, 8, 9, 16, 17, 24, 25, counted from 2 c."""
_ZERO: Final = 128
"""What is added to a zero point, as the kernels add it to weights; so both are exact in bfloat16."""


def pack_words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0..15 [out, in] int32 to words [out / 128, in * 16]; `out` and `in` are multiples of 128."""
    outputs, inputs = numbers.shape
    # Dimensions: 128 outputs, 64, 16, 8, 1; 128 inputs, 32, 16, 8, 2, 1.
    split = numbers.view(outputs // 128, 2, 4, 2, 8, inputs // 128, 4, 2, 2, 4, 2)
    order = split.permute(0, 5, 1, 2, 4, 9, 3, 6, 7, 8, 10).reshape(outputs // 128, inputs * 16, WORD)
    words = torch.zeros(order.shape[:2], dtype=torch.int32, device=numbers.device)
    for place, shift in enumerate(SHIFTS):
        words |= order[..., place] << shift
    return words


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_words`."""
    blocks, inputs = len(words), words.shape[1] // 16
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=words.device)
    order = (words[..., None] >> shifts & 15).view(blocks, inputs // 128, 2, 4, 8, 4, 2, 4, 2, 2, 2)
    return order.permute(0, 2, 3, 6, 4, 1, 7, 8, 9, 5, 10).reshape(blocks * 128, inputs)


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales of any float type and zero points 0..15, both [out, groups], to words [groups, out]: the scale in bfloat16
    in the low half, 128 + zero point in bfloat16 in the high one."""
    low = scales.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    high = (zeros + _ZERO).to(torch.bfloat16).view(torch.int16).int() << 16
    return (low | high).T.contiguous()


def unpack_scales(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_scales`: scales in bfloat16, and zero points in int32, [out, groups] both."""
    halves = words.T.contiguous().view(torch.bfloat16).view(*words.T.shape, 2)
    return halves[..., 0], halves[..., 1].int() - _ZERO


def dequantize_words(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [out, in] in bfloat16, as the kernels round them, of `words` [out / 128, in * 16] and `scales` [groups,
    out]."""
    numbers = unpack_words(words)
    factors, zeros = (each.repeat_interleave(numbers.shape[1] // len(scales), 1) for each in unpack_scales(scales))
    return ((numbers - zeros).float() * factors.float()).to(torch.bfloat16)
