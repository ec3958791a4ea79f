"""Weights that stay in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F

from minisgl.kernels.linear.int4_packed import (
    INPUTS,
    OUTPUTS,
    PIECE,
    WORD,
    dequantize_words,
    groups_in_piece,
    pack_scales,
    pack_words,
)
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.weights.formats import Int4Groups, WeightFormat
from minisgl.layers.weights.inputs import Input, PreNorm, wide
from minisgl.layers.weights.int4_layouts import read_int4
from minisgl.layers.weights.weight import Draw, Matrix, NewTensor, QuantizedWeight, ReadTensor, blocks, spread

_DEVIATION: Final = 4.6
"""Standard deviation of numbers 0..15 of equal probability."""


@dataclass(frozen=True, eq=False)
class Int4Weight(QuantizedWeight):
    """W [out, in], or that of each expert [experts, out, in], in groups of inputs that share a scale and a zero point;
    see `kernels/linear/int4_packed.py`."""

    values: torch.Tensor
    """[…, out / 64, in * 8] int32: words of eight numbers."""
    scales: torch.Tensor
    """[…, out / 64, groups * 64] int32."""

    @classmethod
    def keeps(cls, stored: WeightFormat, matrix: Matrix, *, experts: bool) -> bool:
        return (
            all(each.num_rows % OUTPUTS == 0 for each in matrix.projections)
            and matrix.columns.start % INPUTS == 0
            and matrix.columns.stop % INPUTS == 0
        )

    @classmethod
    def new(cls, new: NewTensor, stored: WeightFormat, *shape: int) -> Self:
        *experts, outputs, inputs = shape
        assert isinstance(stored, Int4Groups)
        pieces, groups = outputs // OUTPUTS, inputs // stored.group_size
        words = new(*experts, pieces, inputs * OUTPUTS // WORD, dtype=torch.int32)
        return cls(words, new(*experts, pieces, groups * OUTPUTS, dtype=torch.int32))

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, pieces, words = self.values.shape
        return *experts, pieces * OUTPUTS, words // PIECE * INPUTS

    @property
    def type_name(self) -> str:
        return "int4"

    def part(self, at: int | slice) -> Self:
        at = at if isinstance(at, int) else blocks(at, OUTPUTS)
        return type(self)(self.values[at], self.scales[at])

    def load(self, stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice, place: slice) -> None:
        assert isinstance(stored, Int4Groups)
        numbers, zeros, scales = read_int4(stored, read, rows, columns)
        part = self.part(place)
        part.values.copy_(pack_words(numbers))
        part.scales.copy_(pack_scales(scales, zeros))

    def fill_random(self, draw: Draw) -> None:
        self.values.random_(-(1 << 31), 1 << 31, generator=draw.generator())
        outputs, groups = len(self.scales) * OUTPUTS, self.scales.shape[1] // OUTPUTS
        scales = torch.full((outputs, groups), draw.in_features**-0.5 / _DEVIATION, device=self.scales.device)
        self.scales.copy_(pack_scales(scales, torch.full_like(scales, 8, dtype=torch.int32)))

    @staticmethod
    def dequantize(stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
        assert isinstance(stored, Int4Groups)
        numbers, zeros, scales = read_int4(stored, read, rows, columns)
        shifted = numbers - spread(zeros, 1, columns, stored.group_size)
        return shifted.to(scales.dtype) * spread(scales, 1, columns, stored.group_size)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Rounded to bfloat16 first."""
        words, scales = self.values.flatten(0, -2), self.scales.flatten(0, -2)
        if words.is_cuda:
            from minisgl.kernels.linear.dequantize_triton import dequantize_words_cuda

            return dequantize_words_cuda(words, scales).view(self.shape).to(dtype)
        return dequantize_words(words, scales).view(self.shape).to(dtype)

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        x = wide(x)
        outputs, inputs = self.shape
        if not len(x):
            return x.new_empty(0, outputs)
        if x.is_cuda:
            from minisgl.kernels.linear.int4_choose import int4_linear, int4_tile

            in_parts = in_parts and bias is None
            groups = groups_in_piece(*self.tensors)
            tile = int4_tile(len(x), outputs, inputs, in_parts=in_parts, groups=groups)
            if tile is not None:
                return int4_linear(x.contiguous(), *self.tensors, tile, bias, in_parts=in_parts)
        return F.linear(x, self.dequantized(x.dtype), bias)

    def fused(
        self, block: PreNorm, bias: torch.Tensor | None, *, gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The product of up to 128 rows, or the sum of its parts, ends with SiLU."""
        if not gated or not block.x.is_cuda:
            return None
        from minisgl.kernels.linear.int4_choose import int4_gated

        normed, residual = block.norm.forward(block.x, block.residual)
        out = int4_gated(normed, *self.tensors, bias)
        return silu_and_mul(self.product(normed, bias)) if out is None else out, residual

    @property
    def has_expert_kernels(self) -> bool:
        return True
