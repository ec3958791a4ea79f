"""Inputs of products, and the operations before them."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch

from minisgl.kernels.pointwise.fp8_rows import Fp8Rows
from minisgl.layers.activation import FeedForwardActivation, silu_and_mul
from minisgl.layers.norm import BlockNorm, RMSNorm

Input: TypeAlias = torch.Tensor | Fp8Rows
"""[T, in], quantized where the operation before a product has done so."""


class InputForm(Enum):
    WIDE = auto()
    """In the model's dtype."""
    FP8_BLOCKS = auto()
    """`Fp8Rows` with a scale per 128 numbers, or wide: then the product quantizes it."""
    FP8_ROWS = auto()
    """The same with a scale per row."""


class PreNorm(NamedTuple):
    """Beginning of a block: its input [T, hidden], or parts of it [parts, T, hidden], is added to the residual stream,
    and the sum, the new stream, is normalized (pre-norm, arXiv:2002.04745). Without a stream `x` begins it. The caller
    must not use `residual` again."""

    norm: BlockNorm
    x: torch.Tensor
    residual: torch.Tensor | None

    @property
    def plain_norm(self) -> tuple[torch.Tensor, float] | None:
        """Gain and epsilon, if kernels that also do something else have this kind of norm."""
        if isinstance(self.norm, RMSNorm) and self.norm.kind.is_plain:
            return self.norm.gain, self.norm.kind.eps
        return None

    def normalize(self, form: InputForm) -> tuple[Input, torch.Tensor]:
        """The norm in this form, and the new stream."""
        if form is InputForm.WIDE:
            return self.norm.forward(self.x, self.residual)
        return self.norm.forward_fp8(self.x, self.residual, per_row=form is InputForm.FP8_ROWS)


def activate(activation: FeedForwardActivation, x: torch.Tensor, form: InputForm) -> Input:
    """`activation` of `x` [T, 2 n], in this form where a kernel writes it so."""
    if form is not InputForm.WIDE and x.is_cuda and activation is silu_and_mul:
        from minisgl.kernels.pointwise.quantize_rows_triton import silu_and_mul_fp8

        return silu_and_mul_fp8(x, per_row=form is InputForm.FP8_ROWS)
    return activation(x)


def wide(x: Input) -> torch.Tensor:
    """`x`, which its producer was not allowed to quantize."""
    assert isinstance(x, torch.Tensor), "only products with FP8 weights take FP8 inputs"
    return x
