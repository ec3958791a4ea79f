"""Weights that stay in FP8: products with activations that are quantized as the checkpoint's authors intend."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from minisgl.kernels.fp8_rows import BLOCK, Fp8Rows, dequantize_rows
from minisgl.kernels.quantize_rows import quantize_rows


class Fp8Weight(NamedTuple):
    """W [out, in], or that of each expert [experts, out, in], with one scale per block of 128 × 128, or one per output
    channel."""

    values: torch.Tensor
    """[…, out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[…, out / 128, in / 128] or […, out, 1] float32: what each value is multiplied with."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def per_channel(self) -> bool:
        """One scale per output channel; inputs have one per row."""
        return self.scales.shape[-2] == self.values.shape[-2]

    def dequantized(self) -> torch.Tensor:
        """[…, out, in] in float32."""
        if self.per_channel:
            return self.values.float() * self.scales
        return self.values.float() * self.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


Activations: TypeAlias = torch.Tensor | Fp8Rows
"""[T, in], quantized where the operation before a product has done so."""


def takes_blocks(weight: object) -> bool:
    """Whether a product of several rows with `weight` takes inputs in FP8 with a scale per 128 numbers."""
    return isinstance(weight, Fp8Weight) and not weight.per_channel


def takes_row(x: torch.Tensor, weight: Fp8Weight) -> bool:
    """Whether the product with `x` [T, in] is computed from one row in 16 bits. It follows from shapes alone, so that a
    captured step can be replayed."""
    if not x.is_cuda:
        return False
    from minisgl.kernels.fp8_row_gluon import fits_row

    return fits_row(x, weight.values)


def fp8_product(
    x: Activations, weight: Fp8Weight, bias: torch.Tensor | None = None, *, in_parts: bool = False
) -> torch.Tensor:
    """[T, in], [out, in] and [out] to [T, out] or, with `in_parts` and no bias, to partial sums [parts, T, out] in
    float32. Activations that are not quantized are quantized first, but for one row on CUDA: it stays in 16 bits."""
    if not isinstance(x, Fp8Rows):
        if not len(x):
            return x.new_empty(0, len(weight.values))
        if takes_row(x, weight):
            from minisgl.kernels.fp8_row_gluon import fp8_row

            return fp8_row(x, weight.values, weight.scales, bias)
    rows = x if isinstance(x, Fp8Rows) else quantize_rows(x, per_row=weight.per_channel)
    if not weight.values.is_cuda:
        return F.linear(dequantize_rows(rows), weight.dequantized(), bias)
    from minisgl.kernels.fp8_batch_gluon import fp8_batch, multiprocessors, takes_batch
    from minisgl.kernels.fp8_linear_gluon import fp8_linear, fp8_tile

    programs = multiprocessors(weight.values.device)
    if takes_batch(rows.rows, *weight.shape, programs, per_channel=weight.per_channel):
        out = fp8_batch(rows, weight.values, weight.scales)
        return out if bias is None else out + bias
    tile = fp8_tile(rows.rows, *weight.shape, in_parts=in_parts and bias is None)
    if tile is not None:
        return fp8_linear(rows, weight.values, weight.scales, tile, bias)
    # Padded rows: columns of scales of blocks must be aligned. Per channel the tensor cores add up all products, as in
    # other engines. They keep 14 bits of the largest number: with weights of both signs 17,408 inputs give an error of
    # 0.4 % (0.2 in bfloat16), but with positive numbers alone a quarter would be lost.
    out = torch._scaled_mm(
        rows.values,
        weight.values.T,
        scale_a=rows.scales.T,
        scale_b=weight.scales.T,
        out_dtype=torch.bfloat16,
        use_fast_accum=weight.per_channel,
    )[: rows.rows]
    return out if bias is None else out + bias
