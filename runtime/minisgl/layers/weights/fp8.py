"""Weights that stay in FP8: products with activations that are quantized as the checkpoint's authors intend. Their
kernels on a GPU, the first line that fits, measured with benchmarks/fp8_batch.py:

| rows, outputs of W, scales | kernel | why |
|---|---|---|
| 1, also with norm and SiLU × up | `fp8_gemv_gluon` | the row stays in 16 bits, W goes into registers |
| 33 to 64 with many outputs, blocks | `fp8_persistent_gluon` | one program per multiprocessor; copies beside products |
| 65 and more where it is faster, blocks | `fp8_persistent_gluon` | programs share the tiles of the last wave |
| up to 64; 128 if the consumer adds up parts | `fp8_skinny_gluon` | close to one read of W; sums in float32 |
| others | torch (cuBLAS) | receives rows and weights of several programs together |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F

from minisgl.kernels.pointwise.fp8_rows import BLOCK, E4M3_MAX, E4M3_NAN, SMALLEST, Fp8Rows, dequantize_rows
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.layers.weights.formats import Fp8Channels, WeightFormat
from minisgl.layers.weights.inputs import Input, InputForm, PreNorm
from minisgl.layers.weights.weight import (
    Draw,
    Kernel,
    Matrix,
    NewTensor,
    NotFiniteError,
    QuantizedWeight,
    ReadTensor,
    blocks,
    finite,
    spread,
)

_SPREAD: Final = 100.0
"""Standard deviation of random FP8 numbers, which reach 448."""


@dataclass(frozen=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """W [out, in], or that of each expert [experts, out, in], with one scale per block of 128 × 128, or one per output
    channel. Experts have blocks. A scale of a whole tensor is that of each of its channels or blocks."""

    values: torch.Tensor
    """[…, out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[…, out / 128, in / 128] or […, out, 1] float32: what each value is multiplied with."""

    @classmethod
    def keeps(cls, stored: WeightFormat, matrix: Matrix, *, experts: bool) -> bool:
        if isinstance(stored, Fp8Channels):
            parts = [matrix.shape[1], *(each.num_rows for each in matrix.projections)]
            if experts:
                return stored.per_tensor and all(size % BLOCK == 0 for size in parts)
            return all(size % BLOCK == 0 for size in matrix.shape)
        bounds = [matrix.in_features, matrix.columns.start, matrix.columns.stop]
        for each in matrix.projections:
            bounds += [each.out_features, each.rows.start, each.rows.stop]
        return all(bound % BLOCK == 0 for bound in bounds)

    @classmethod
    def new(cls, new: NewTensor, stored: WeightFormat, *shape: int) -> Self:
        *experts, outputs, inputs = shape
        by_channel = isinstance(stored, Fp8Channels) and not experts
        scales = (outputs, 1) if by_channel else (outputs // BLOCK, inputs // BLOCK)
        return cls(new(*shape, dtype=torch.float8_e4m3fn), new(*experts, *scales, dtype=torch.float32))

    @property
    def per_channel(self) -> bool:
        """One scale per output channel; inputs have one per row."""
        return self.scales.shape[-2] == self.values.shape[-2]

    @property
    def type_name(self) -> str:
        return "fp8-channel" if self.per_channel else "fp8-block"

    def part(self, at: int | slice) -> Self:
        of_scales = at if isinstance(at, int) or self.per_channel else blocks(at, BLOCK)
        return type(self)(self.values[at], self.scales[of_scales])

    def load(self, stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice, place: slice) -> None:
        part, values = self.part(place), read("weight", rows, columns)
        if isinstance(stored, Fp8Channels) and stored.while_loading:
            quantized = quantize_channels(values)
            values, scales = quantized.values, quantized.scales
        else:
            name, at = _scales_of(stored, rows, columns)
            scales = read(name, *at)
            if bool(((values.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any()):
                raise NotFiniteError("weight")
            if not bool(scales.isfinite().all()):
                raise NotFiniteError(name)
        part.values.copy_(values)
        part.scales.copy_(scales)

    def fill_random(self, draw: Draw) -> None:
        wide = draw.normal() * (_SPREAD * draw.in_features**0.5)
        self.values.copy_(wide.clamp(-E4M3_MAX, E4M3_MAX))
        self.scales.fill_(draw.in_features**-0.5 / _SPREAD)

    @staticmethod
    def dequantize(stored: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
        values = read("weight", rows, columns)
        if isinstance(stored, Fp8Channels) and stored.while_loading:
            return quantize_channels(values).dequantized(torch.float32)
        name, at = _scales_of(stored, rows, columns)
        scales = finite(read(name, *at), name)
        if isinstance(stored, Fp8Channels):
            return values.to(scales.dtype) * scales
        return values.float() * spread(spread(scales.float(), 0, rows, BLOCK), 1, columns, BLOCK)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        if self.values.is_cuda and self.values.dim() == 3:
            from minisgl.kernels.linear.dequantize_triton import dequantize_blocks

            return dequantize_blocks(*self.tensors, dtype)
        scales = self.scales
        if not self.per_channel:
            scales = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return (self.values.float() * scales).to(dtype)

    @property
    def form(self) -> InputForm:
        return InputForm.FP8_ROWS if self.per_channel else InputForm.FP8_BLOCKS

    def form_of(self, x: torch.Tensor) -> InputForm:
        """One row stays in 16 bits on a GPU."""
        if x.is_cuda:
            from minisgl.kernels.linear.fp8_gemv_gluon import fits

            if fits(x, self.values):
                return InputForm.WIDE
        return self.form

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        """Rows that are not quantized are quantized first, unless `form_of` says otherwise."""
        if isinstance(x, torch.Tensor):
            if not len(x):
                return x.new_empty(0, len(self.values))
            if self.form_of(x) is InputForm.WIDE:
                from minisgl.kernels.linear.fp8_gemv_gluon import fp8_row

                return fp8_row(x, *self.tensors, bias)
            x = quantize_rows(x, per_row=self.per_channel)
        if not self.values.is_cuda:
            return F.linear(dequantize_rows(x), self.dequantized(torch.float32), bias)
        for kernel in _kernels():
            if tile := kernel.fits(x, self, in_parts and bias is None):
                return kernel.run(x, self, bias, tile)
        # Padded rows: columns of scales of blocks must be aligned. Per channel the tensor cores add up all products, as
        # in other engines. They keep 14 bits of the largest number: with weights of both signs 17,408 inputs give an
        # error of 0.4 % (0.2 in bfloat16), but with positive numbers alone a quarter would be lost.
        out = torch._scaled_mm(
            x.values,
            self.values.T,
            scale_a=x.scales.T,
            scale_b=self.scales.T,
            out_dtype=torch.bfloat16,
            use_fast_accum=self.per_channel,
        )[: x.rows]
        return out if bias is None else out + bias

    def fused(
        self, block: PreNorm, bias: torch.Tensor | None, *, gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        norm = block.plain_norm
        if norm is None or self.form_of(block.x) is not InputForm.WIDE:
            return None
        from minisgl.kernels.linear.fp8_gemv_gluon import normed_fp8_row

        return normed_fp8_row(block.x, block.residual, *norm, *self.tensors, bias, gated=gated)

    @property
    def has_expert_kernels(self) -> bool:
        return True


@functools.cache
def _kernels() -> Sequence[Kernel]:
    """`fits(x, weight, in_parts)`, `run(x, weight, bias, tile)`."""
    from minisgl.kernels.linear import fp8_persistent_gluon as persistent
    from minisgl.kernels.linear import fp8_skinny_gluon as skinny

    def fits_persistent(x: Fp8Rows, weight: Fp8Weight, in_parts: bool) -> bool:
        programs = persistent.multiprocessors(weight.values.device)
        return not weight.per_channel and persistent.fits(x.rows, *weight.shape, programs)

    def run_persistent(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, tile: object) -> torch.Tensor:
        out = persistent.fp8_batch(x, *weight.tensors)
        return out if bias is None else out + bias

    return (
        Kernel(fits_persistent, run_persistent),
        Kernel(
            lambda x, weight, in_parts: skinny.fp8_tile(x.rows, *weight.shape, in_parts=in_parts),
            lambda x, weight, bias, tile: skinny.fp8_linear(x, weight.values, weight.scales, tile, bias),
        ),
    )


def _scales_of(stored: WeightFormat, rows: slice, columns: slice) -> tuple[str, tuple[slice, ...]]:
    """Name of the tensor that has the scales of these weights, and the part of it."""
    if isinstance(stored, Fp8Channels):
        return "weight_scale", () if stored.per_tensor else (rows, slice(None))
    return "weight_scale_inv", (blocks(rows, BLOCK), blocks(columns, BLOCK))


def quantize_channels(weight: torch.Tensor) -> Fp8Weight:
    """Quantize a weight [out, in] of any float type to FP8 with one scale per output channel, so that the largest value
    of a channel becomes 448. Raises ValueError when a value is not finite."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / E4M3_MAX
    if not bool(scales.isfinite().all()):
        raise ValueError("it has values that are not finite")
    return Fp8Weight((wide / scales).to(torch.float8_e4m3fn), scales)
