"""Weights in the model's dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.layers.weights.inputs import Input, PreNorm, wide
from minisgl.layers.weights.weight import Kernel, Weight


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        x = wide(x)
        for kernel in _kernels() if x.is_cuda else ():
            if tile := kernel.fits(x, self.values, in_parts and bias is None):
                return kernel.run(x, self.values, bias, tile)
        return F.linear(x, self.values, bias)

    def fused(
        self, block: PreNorm, bias: torch.Tensor | None, *, gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (norm := self._norm_for_kernel(block)) is None:
            return None
        from minisgl.kernels.linear.dense_skinny_triton import normed_linear

        return normed_linear(block.x, block.residual, *norm, self.values, bias, gated=gated)

    def norm_and_product(self, block: PreNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `normed_product`, for callers that also use the norm: the norm, the product and the sum."""
        if (norm := self._norm_for_kernel(block)) is None:
            normed, residual = block.norm.forward(block.x, block.residual)
            return normed, self.product(normed), residual
        from minisgl.kernels.linear.dense_skinny_triton import normed_linear

        normed = torch.empty_like(block.x)
        return normed, *normed_linear(block.x, block.residual, *norm, self.values, normed=normed)

    def _norm_for_kernel(self, block: PreNorm) -> tuple[torch.Tensor, float] | None:
        """Gain and epsilon of the norm, if one kernel computes it and the product."""
        if not block.x.is_cuda:
            return None
        from minisgl.kernels.linear.dense_skinny_triton import fits_normed

        return block.plain_norm if fits_normed(block.x, self.values) else None

    @property
    def has_expert_kernels(self) -> bool:
        return True


@functools.cache
def _kernels() -> Sequence[Kernel]:
    """`fits(x, w, in_parts)`, `run(x, w, bias, tile)`."""
    from minisgl.kernels.linear import dense_skinny_triton as skinny
    from minisgl.kernels.linear import dense_split_k_gluon as batch

    def run_skinny(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tile: object) -> torch.Tensor:
        return skinny.skinny_linear(x, w, bias)

    return (
        Kernel(lambda x, w, in_parts: skinny.fits_registers(x, w), run_skinny),
        Kernel(
            lambda x, w, in_parts: batch.batch_tile(x, w, in_parts=in_parts),
            lambda x, w, bias, tile: batch.batch_linear(x, w, tile, bias),
        ),
        Kernel(lambda x, w, in_parts: skinny.fits(x, w), run_skinny),
    )
