"""Weights that stay in MXFP4, for experts (OCP Microscaling Formats, 1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch

from minisgl.kernels.linear.fp4_packed import CODES, LARGEST_EXPONENT, dequantize_fp4, pack_codes, pack_exponents
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, WORD
from minisgl.layers.weights.formats import Mxfp4Blocks, WeightFormat
from minisgl.layers.weights.inputs import Input
from minisgl.layers.weights.weight import (
    Draw,
    Matrix,
    NewTensor,
    NotFiniteError,
    QuantizedWeight,
    ReadTensor,
    blocks,
    cut,
    spread,
)

BLOCK: Final = Mxfp4Blocks.block
_BIAS: Final = 127
_NAN: Final = 255
_DEVIATION: Final = 2.9
"""Standard deviation of the values of all codes."""


@dataclass(frozen=True, eq=False)
class Mxfp4Weight(QuantizedWeight):
    """W of each expert [experts, out, in], in blocks of 32 inputs that share an exponent; see
    `kernels/linear/fp4_packed.py`. Behind the last output of each projection and the last input are zeros."""

    values: torch.Tensor
    """[…, out / 64, in / 128 * 1024] int32: words of eight codes."""
    scales: torch.Tensor
    """[…, out / 64, in / 128 * 256] uint8: exponents."""
    in_features: int
    """Inputs without the padding."""

    row_multiple = OUTPUTS

    @classmethod
    def keeps(cls, stored: WeightFormat, matrix: Matrix, *, experts: bool) -> bool:
        return experts and matrix.columns.start % BLOCK == 0 and matrix.columns.stop % BLOCK == 0

    @classmethod
    def new(cls, new: NewTensor, stored: WeightFormat, *shape: int) -> Self:
        *experts, outputs, inputs = shape
        pieces, steps = outputs // OUTPUTS, -(-inputs // INPUTS)
        words = new(*experts, pieces, steps * INPUTS * OUTPUTS // WORD, dtype=torch.int32)
        scales = new(*experts, pieces, steps * INPUTS // BLOCK * OUTPUTS, dtype=torch.uint8)
        return cls(words.zero_(), scales.zero_(), inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, pieces, _ = self.values.shape
        return *experts, pieces * OUTPUTS, self.in_features

    @property
    def type_name(self) -> str:
        return "mxfp4"

    def part(self, at: int | slice) -> Self:
        at = at if isinstance(at, int) else blocks(at, OUTPUTS)
        return type(self)(self.values[at], self.scales[at], self.in_features)

    def load(self, stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice, place: slice) -> None:
        codes, exponents = _read(read, rows, columns)
        if int(exponents.max()) > LARGEST_EXPONENT:
            raise ValueError(f"a block has the scale 2^{int(exponents.max()) - _BIAS}, above those that kernels take")
        part = self.part(place)
        outputs, inputs = len(part.values) * OUTPUTS, self.values.shape[-1] * WORD // OUTPUTS
        padding = outputs - len(codes)
        wide = torch.nn.functional.pad(codes, (0, inputs - codes.shape[1], 0, padding))
        part.values.copy_(pack_codes(wide))
        wide = torch.nn.functional.pad(exponents, (0, inputs // BLOCK - exponents.shape[1], 0, padding))
        part.scales.copy_(pack_exponents(wide))

    def fill_random(self, draw: Draw) -> None:
        self.values.random_(-(1 << 31), 1 << 31, generator=draw.generator())
        # Words of 32 inputs each, which come fourth: those of the padding stay zeros.
        padded = -self.in_features % INPUTS // BLOCK
        last = self.values.view(len(self.values), -1, 256, 4)[:, -1, :, 4 - padded :]
        last.zero_()
        scale = draw.in_features**-0.5 / _DEVIATION
        exponent = torch.tensor(scale).log2().round().int() + _BIAS
        self.scales.copy_(pack_exponents(exponent.expand(len(self.scales) * OUTPUTS, self.scales.shape[1] // OUTPUTS)))

    @staticmethod
    def dequantize(stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
        codes, exponents = _read(read, rows, columns)
        values = torch.tensor(CODES, device=codes.device)[codes]
        return torch.ldexp(values, spread(exponents - _BIAS, 1, columns, BLOCK))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        words, scales = self.values.flatten(0, -2), self.scales.flatten(0, -2)
        if words.is_cuda:
            from minisgl.kernels.linear.fp4_dequantize_triton import dequantize_fp4_cuda

            return dequantize_fp4_cuda(words, scales, self.in_features).view(self.shape).to(dtype)
        return dequantize_fp4(words, scales)[:, : self.in_features].reshape(self.shape).to(dtype)

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        raise AssertionError("only experts are in MXFP4")

    @property
    def has_expert_kernels(self) -> bool:
        return True


def _read(read: ReadTensor, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 [rows, columns] and exponents [rows, blocks], which are at most 254; int32 both."""
    at = blocks(columns, BLOCK)
    packed, exponents = read("_blocks", rows, at, slice(None)), read("_scales", rows, at).int()
    if bool((exponents == _NAN).any()):
        raise NotFiniteError("_scales")
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()
    return cut(codes, 1, columns, BLOCK), exponents
