"""Norms before and behind a block."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from minisgl.kernels.pointwise.fp8_rows import Fp8Rows
from minisgl.kernels.pointwise.norm import add_rms_norm
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.layers.norm_config import NormConfig


class RMSNorm(NamedTuple):
    gain: torch.Tensor
    kind: NormConfig

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, and normalize it for the next block. Without a stream `x` begins it."""
        kind = self.kind
        return add_rms_norm(
            x, residual, self.gain, kind.eps, unit_offset=kind.unit_offset, round_last=kind.round_last
        )

    def forward_fp8(
        self, x: torch.Tensor, residual: torch.Tensor | None, *, per_row: bool
    ) -> tuple[Fp8Rows, torch.Tensor]:
        """As `forward`, with the norm quantized for a product with FP8 weights."""
        if x.is_cuda:
            from minisgl.kernels.pointwise.quantize_rows_triton import rms_norm_fp8

            kind = self.kind
            rows = rms_norm_fp8(
                *(x, residual, self.gain, kind.eps),
                per_row=per_row,
                unit_offset=kind.unit_offset,
                round_last=kind.round_last,
            )
            return rows, x if residual is None else residual
        normed, residual = self.forward(x, residual)
        return quantize_rows(normed, per_row=per_row), residual


class ResidualSum:
    """Beginning of a block that has no norm before it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As that of a norm: the sum twice, since it is also the input of the block."""
        total = x if residual is None else x + residual
        return total, total

    def forward_fp8(
        self, x: torch.Tensor, residual: torch.Tensor | None, *, per_row: bool
    ) -> tuple[Fp8Rows, torch.Tensor]:
        total, _ = self.forward(x, residual)
        return quantize_rows(total, per_row=per_row), total


BlockNorm: TypeAlias = RMSNorm | ResidualSum
