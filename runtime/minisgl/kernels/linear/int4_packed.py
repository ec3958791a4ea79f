"""Weights of 4 bits, eight in a word of 32 bits, in the order in which the tensor cores read them.

64 outputs and 128 inputs are 1,024 words in one piece: for each 8 outputs and each of 32 threads, 4 words of the
weights that this thread multiplies. Thread 4 g + c has output g of the 8; of each 8 inputs it has 2 c and 2 c + 1. A
word has those of 32 inputs; two neighbouring inputs are 16 bits apart, so that one operation takes them out
together."""

from __future__ import annotations

from typing import Final

import torch

WORD: Final = 8
"""Weights in a word."""
OUTPUTS: Final = 64
"""Outputs of a piece."""
INPUTS: Final = 128
"""Inputs of a piece."""
PIECE: Final = OUTPUTS * INPUTS // WORD
"""Words of a piece."""
_SHIFTS: Final = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bits at which a word has the weights of inputs 0, 1, 8, 9, 16, 17, 24, 25, counted from 2 c."""
_ZERO_BITS: Final = 15
"""Bits of a scale's word for the zero point: the lowest ones of a float32, which scales in 16 bits do not use."""


def pack_words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0..15 [out, in] int32 to words [out / 64, in * 8]; `out` is a multiple of 64, `in` of 128."""
    outputs, inputs = numbers.shape
    # Dimensions: 64 outputs, 8, 1; 128 inputs, 32, 16, 8, 2, 1.
    split = numbers.view(outputs // OUTPUTS, 8, 8, inputs // INPUTS, 4, 2, 2, 4, 2)
    order = split.permute(0, 3, 1, 2, 7, 4, 5, 6, 8).reshape(outputs // OUTPUTS, inputs * OUTPUTS // WORD, WORD)
    words = torch.zeros(order.shape[:2], dtype=torch.int32, device=numbers.device)
    for place, shift in enumerate(_SHIFTS):
        words |= order[..., place] << shift
    return words


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_words`."""
    blocks, inputs = len(words), words.shape[1] * WORD // OUTPUTS
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    order = (words[..., None] >> shifts & 15).view(blocks, inputs // INPUTS, 8, 8, 4, 4, 2, 2, 2)
    return order.permute(0, 2, 3, 1, 5, 6, 7, 4, 8).reshape(blocks * OUTPUTS, inputs)


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales of any float type and zero points 0..15, both [out, groups], to words [out / 64, groups * 64]: the bits of
    the scale in float32, with the zero point in the lowest 4. Scales of 16 bits stay as they are."""
    outputs, groups = scales.shape
    words = (scales.float().view(torch.int32) & ~_ZERO_BITS) | zeros
    return words.view(outputs // OUTPUTS, OUTPUTS, groups).transpose(1, 2).reshape(outputs // OUTPUTS, groups * OUTPUTS)


def unpack_scales(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_scales`: scales in float32, and zero points in int32, [out, groups] both."""
    by_output = words.view(len(words), -1, OUTPUTS).transpose(1, 2).reshape(len(words) * OUTPUTS, -1)
    return (by_output & ~_ZERO_BITS).view(torch.float32), by_output & _ZERO_BITS


def groups_in_piece(words: torch.Tensor, scales: torch.Tensor) -> int:
    """Groups of inputs in a piece: 1, 2 or 4. `words` […, in * 8] and `scales` […, groups * 64] of the same weights."""
    return scales.shape[-1] * PIECE // (words.shape[-1] * OUTPUTS)


def dequantize_words(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [out, in] in bfloat16 of `words` [out / 64, in * 8] and `scales` [out / 64, groups * 64]: exact products,
    rounded once."""
    numbers = unpack_words(words)
    size = numbers.numel() // scales.numel()
    factors, zeros = (each.repeat_interleave(size, 1) for each in unpack_scales(scales))
    return ((numbers - zeros).float() * factors).to(torch.bfloat16)
