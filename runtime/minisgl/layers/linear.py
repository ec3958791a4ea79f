"""Linear layers split over the ranks as in Megatron-LM (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.fp8_rows import Fp8Rows
from minisgl.layers.fp8_weight import Activations, Fp8Weight, fp8_product
from minisgl.layers.int4_weight import Int4Weight, int4_product
from minisgl.layers.new_weight import Projection, Weight, new_weight
from minisgl.layers.parameters import Parameters


def linear(x: Activations, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, in], [out, in] and [out] to [T, out]."""
    if isinstance(weight, Fp8Weight):
        return fp8_product(x, weight, bias)
    if isinstance(weight, Int4Weight):
        assert not isinstance(x, Fp8Rows)
        return int4_product(x, weight, bias)
    assert not isinstance(x, Fp8Rows), "only products with FP8 weights take FP8 activations"
    if x.is_cuda:
        from minisgl.kernels.batch_linear_gluon import batch_linear, batch_tile
        from minisgl.kernels.skinny_linear_triton import fits, fits_registers, skinny_linear

        if fits_registers(x, weight):
            return skinny_linear(x, weight, bias)
        tile = batch_tile(x, weight, in_parts=False)
        if tile is not None:
            return batch_linear(x, weight, tile, bias)
        if fits(x, weight):
            return skinny_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_in_parts(x: Activations, weight: Weight) -> torch.Tensor:
    """[T, in] and [out, in] to [T, out] or to partial sums [parts, T, out] in float32 for the next norm to add up: that
    gives a small product with few outputs enough programs for the whole GPU."""
    if isinstance(weight, Fp8Weight):
        return fp8_product(x, weight, in_parts=True)
    if isinstance(weight, Int4Weight):
        assert not isinstance(x, Fp8Rows)
        return int4_product(x, weight, in_parts=True)
    if not isinstance(x, Fp8Rows) and x.is_cuda:
        from minisgl.kernels.batch_linear_gluon import batch_linear, batch_tile
        from minisgl.kernels.skinny_linear_triton import fits_registers

        tile = None if fits_registers(x, weight) else batch_tile(x, weight, in_parts=True)
        if tile is not None:
            return batch_linear(x, weight, tile)
    return linear(x, weight)


class ColumnParallelLinear:
    """Output features split over the ranks; several projections of one input are one matrix product.

    [T, in] to [T, rows of all projections, side by side].
    """

    def __init__(
        self, parameters: Parameters, in_features: int, projections: Sequence[Projection], *, bias: bool
    ) -> None:
        self.weight = new_weight(parameters, projections, in_features)
        self.bias = _new_bias(parameters, projections) if bias else None

    def forward(self, x: Activations) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def _new_bias(parameters: Parameters, projections: Sequence[Projection]) -> torch.Tensor:
    bias = parameters.new(sum(each.rows.stop - each.rows.start for each in projections))
    begin = 0
    for name, out_features, rows in projections:
        end = begin + rows.stop - rows.start
        parameters.add_source(f"{name}.bias", (out_features,), bias[begin:end], rows)
        begin = end
    return bias


class RowParallelLinear:
    """Input features split over the ranks; [T, in of this rank] to [T, out], summed over the ranks. With one rank,
    the norm computes the sum of `linear_in_parts`."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        in_features: int,
        out_features: int,
        parallel: TensorParallel,
        *,
        bias: bool,
    ) -> None:
        self._parallel = parallel
        columns = parallel.shard(in_features)
        projection = Projection(name, out_features, slice(0, out_features))
        self.weight = new_weight(parameters, [projection], in_features, columns)
        self.bias = parameters.replicated(f"{name}.bias", out_features) if bias else None

    def forward(self, x: Activations) -> torch.Tensor:
        if self._parallel.size == 1:
            return linear_in_parts(x, self.weight) if self.bias is None else linear(x, self.weight, self.bias)
        out = self._parallel.all_reduce_sum(linear(x, self.weight))
        # Only after the sum: added on every rank before it, the bias would count once per rank.
        return out if self.bias is None else out + self.bias
