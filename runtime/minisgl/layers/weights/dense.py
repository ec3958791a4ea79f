"""Weights in the model's dtype, and the kernels of their products on a GPU; the first line that fits, measured with
benchmarks/batch_linear.py and decode_kernels.py:

| rows, outputs of W | kernel | why |
|---|---|---|
| 1 with up to 5,120 inputs, behind a norm | `dense_skinny_triton` | norm, product and SiLU × up in one launch |
| 1; up to 4 with 2,048 outputs; up to 8 with 128 | `dense_skinny_triton`, in registers | reads W ahead |
| 2 to 256 with up to 9 Mi weights | `dense_split_k_gluon` | programs share the inputs of an output, and read W ahead |
| up to 8 | `dense_skinny_triton`, on tensor cores | one read of W, in many small tiles |
| others | cuBLAS | as fast |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.layers.norm import RMSNorm
from minisgl.layers.weights.inputs import Input, PreNorm, wide
from minisgl.layers.weights.weight import Kernel, Weight


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    values: torch.Tensor
    """In the type of the inputs, or in float32, as products then are."""

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
        return F.linear(x.to(self.values.dtype), self.values, bias)

    def fused(
        self, block: PreNorm, bias: torch.Tensor | None, *, gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (norm := self._norm_for_kernel(block)) is None:
            return None
        from minisgl.kernels.linear.dense_skinny_triton import normed_linear

        kind = norm.kind
        return normed_linear(
            block.x, block.residual, norm.gain, kind.eps, self.values, bias, gated=gated, round_last=kind.round_last
        )

    def norm_and_product(
        self, block: PreNorm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `normed_product`, for callers that also use the norm: the norm, the product and the sum."""
        if (norm := self._norm_for_kernel(block)) is None:
            normed, residual = block.norm.forward(block.x, block.residual)
            return normed, self.product(normed, bias), residual
        from minisgl.kernels.linear.dense_skinny_triton import normed_linear

        normed, kind = torch.empty_like(block.x), norm.kind
        return normed, *normed_linear(
            block.x, block.residual, norm.gain, kind.eps, self.values, bias, normed=normed, round_last=kind.round_last
        )

    def _norm_for_kernel(self, block: PreNorm) -> RMSNorm | None:
        """The norm, if one kernel computes it and the product."""
        norm = block.norm
        if not block.x.is_cuda or not isinstance(norm, RMSNorm) or norm.kind.unit_offset:
            return None
        from minisgl.kernels.linear.dense_skinny_triton import fits

        return norm if fits(block.x, self.values, normed=True) else None

    @property
    def has_expert_kernels(self) -> bool:
        return True


@functools.cache
def _kernels() -> Sequence[Kernel]:
    """`fits(x, w, in_parts)`, `run(x, w, bias, tile)`."""
    from minisgl.kernels.linear import dense_skinny_triton as skinny
    from minisgl.kernels.linear import dense_split_k_gluon as split_k

    def run_skinny(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tile: object) -> torch.Tensor:
        return skinny.skinny_linear(x, w, bias)

    return (
        Kernel(lambda x, w, in_parts: skinny.fits(x, w, in_registers=True), run_skinny),
        Kernel(
            lambda x, w, in_parts: split_k.batch_tile(x, w, in_parts=in_parts),
            lambda x, w, bias, tile: split_k.batch_linear(x, w, tile, bias),
        ),
        Kernel(lambda x, w, in_parts: skinny.fits(x, w), run_skinny),
    )
