"""Weights that stay in FP8: products with activations that are quantized as the checkpoint's authors intend."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from minisgl.kernels.fp8_rows import BLOCK, Fp8Rows, dequantize_rows
from minisgl.kernels.quantize_rows import quantize_rows


class Fp8Weight(NamedTuple):
    """W [out, in] with one scale per block of 128 × 128."""

    values: torch.Tensor
    """[out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[out / 128, in / 128] float32: what each value is multiplied with."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


Activations: TypeAlias = torch.Tensor | Fp8Rows
"""[T, in], quantized where the operation before a product has done so."""


def fp8_product(
    x: Activations, weight: Fp8Weight, bias: torch.Tensor | None = None, *, in_parts: bool = False
) -> torch.Tensor:
    """[T, in], [out, in] and [out] to [T, out] or, with `in_parts` and no bias, to partial sums [parts, T, out] in
    float32. Activations that are not quantized are quantized first."""
    if not isinstance(x, Fp8Rows) and not len(x):
        return x.new_empty(0, len(weight.values))
    rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
    if not weight.values.is_cuda:
        blocks = weight.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return F.linear(dequantize_rows(rows), weight.values.float() * blocks, bias)
    from minisgl.kernels.fp8_linear_gluon import fp8_linear, fp8_tile

    tile = fp8_tile(rows.rows, *weight.shape, in_parts=in_parts and bias is None)
    if tile is not None:
        return fp8_linear(rows, weight.values, weight.scales, tile, bias)
    out: torch.Tensor = torch._scaled_mm(
        rows.values,
        weight.values.T,
        scale_a=rows.scales.T,
        scale_b=weight.scales.T,
        out_dtype=torch.bfloat16,
    )[: rows.rows]
    return out if bias is None else out + bias
