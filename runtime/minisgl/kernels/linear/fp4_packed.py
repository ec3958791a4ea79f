"""Weights of MXFP4 (e2m1, with one exponent per 32 inputs), in pieces of 64 outputs and 128 inputs as in `int4_packed`.

The four codes in each half of a word lie so that a shift and a mask make a bfloat16 of each of the first three: the
sign at bit 15, exponent and mantissa at bits 8 to 6. That number is 2^-126 times the code's value; the product with the
block's exponent, moved by 126, is exact. The codes of two neighbouring inputs are decoded together.

| code of the half | sign | two bits of the exponent | mantissa | moved by |
|---|---|---|---|---|
| first | 15 | 8, 7 | 6 | 0 |
| second | 12 | 5, 4 | 3 | 3 to the left |
| third | 9 | 2, 1 | 0 | 6 to the left |
| fourth | 14 | 11, 10 | 13 | 1 to the left, 3 and 7 to the right |
"""

from __future__ import annotations

from typing import Final

import torch

from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, pack_words
from minisgl.kernels.linear.int4_packed import unpack_words as unpack_nibbles

BLOCK: Final = 32
"""Inputs that share an exponent."""
CODES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each code of e2m1."""
SHIFT: Final = 126
"""What is added to the exponents of a checkpoint, whose bias is 127."""
LARGEST_EXPONENT: Final = 254 - SHIFT
"""Largest exponent of a checkpoint whose sum is that of a bfloat16: blocks of scale 2."""
_PLACES: Final = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""Bits of a half of a word for bits 3 to 0 of each of its codes."""


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [out, in] int32 to words [out / 64, in * 8]; `out` is a multiple of 64, `in` of 128."""
    nibbles = pack_words(codes)
    words = torch.zeros_like(nibbles)
    for code, places in enumerate(_PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            words |= (nibbles >> 4 * code + bit & 0x10001) << place
    return words


def unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    nibbles = torch.zeros_like(words)
    for code, places in enumerate(_PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            nibbles |= (words >> place & 0x10001) << 4 * code + bit
    return unpack_nibbles(nibbles)


def pack_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents of a checkpoint, at most LARGEST_EXPONENT, [out, blocks] to bytes [out / 64, blocks * 64]: for each
    piece and output, those of its four blocks. `blocks` is a multiple of 4."""
    outputs, count = exponents.shape
    moved = (exponents + SHIFT).to(torch.uint8).view(outputs // OUTPUTS, OUTPUTS, count // 4, 4)
    return moved.transpose(1, 2).reshape(outputs // OUTPUTS, count * OUTPUTS)


def unpack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_exponents`, int32."""
    pieces = scales.view(len(scales), -1, OUTPUTS, 4).transpose(1, 2)
    return pieces.reshape(len(scales) * OUTPUTS, -1).int() - SHIFT


def dequantize_fp4(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [out, in] in float32 of `words` [out / 64, in * 8] and `scales` [out / 64, in * 2]."""
    values = torch.tensor(CODES, device=words.device)[unpack_codes(words)]
    return torch.ldexp(values, unpack_exponents(scales).repeat_interleave(BLOCK, 1) - 127)


def steps_of(words: torch.Tensor) -> int:
    """Pieces behind each other of `words` […, in * 8]."""
    return words.shape[-1] // PIECE


assert (OUTPUTS, INPUTS, BLOCK) == (64, 128, 32)
