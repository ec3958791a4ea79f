"""Norm at the beginning of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl.kernels.pointwise.fp8_rows import Fp8Rows
from minisgl.kernels.pointwise.norm import add_rms_norm
from minisgl.kernels.pointwise.quantize_rows import quantize_rows


class RMSNorm(NamedTuple):
    gain: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, and normalize it for the next block. Without a stream `x` begins it."""
        return add_rms_norm(x, residual, self.gain, self.eps)

    def forward_fp8(
        self, x: torch.Tensor, residual: torch.Tensor | None, *, per_row: bool
    ) -> tuple[Fp8Rows, torch.Tensor]:
        """As `forward`, with the norm quantized for a product with FP8 weights."""
        if x.is_cuda:
            from minisgl.kernels.pointwise.quantize_rows_triton import rms_norm_fp8

            rows = rms_norm_fp8(x, residual, self.gain, self.eps, per_row=per_row)
            return rows, x if residual is None else residual
        normed, residual = self.forward(x, residual)
        return quantize_rows(normed, per_row=per_row), residual
