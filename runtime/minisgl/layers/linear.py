"""Linear layers split over the ranks as in Megatron-LM (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.parameters import Parameters


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, in], [out, in] and [out] to [T, out]."""
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


def linear_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, in] and [out, in] to [T, out] or to partial sums [parts, T, out] in float32 for the next norm to add up: that
    gives a small product with few outputs enough programs for the whole GPU."""
    if x.is_cuda:
        from minisgl.kernels.batch_linear_gluon import batch_linear, batch_tile
        from minisgl.kernels.skinny_linear_triton import fits_registers

        tile = None if fits_registers(x, weight) else batch_tile(x, weight, in_parts=True)
        if tile is not None:
            return batch_linear(x, weight, tile)
    return linear(x, weight)


class Projection(NamedTuple):
    """One projection of a checkpoint and this rank's rows of it."""

    name: str
    out_features: int
    rows: slice


class ColumnParallelLinear:
    """Output features split over the ranks; several projections of one input are one matrix product.

    [T, in] to [T, rows of all projections, side by side].
    """

    def __init__(
        self, parameters: Parameters, in_features: int, projections: Sequence[Projection], *, bias: bool
    ) -> None:
        local = sum(p.rows.stop - p.rows.start for p in projections)
        self.weight = parameters.new(local, in_features)
        self.bias = parameters.new(local) if bias else None
        begin = 0
        for name, out_features, rows in projections:
            end = begin + rows.stop - rows.start
            parameters.add_weight(name, (out_features, in_features), self.weight[begin:end], rows)
            if self.bias is not None:
                parameters.add_source(f"{name}.bias", (out_features,), self.bias[begin:end], rows)
            begin = end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


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
        self.weight = parameters.new(out_features, columns.stop - columns.start)
        parameters.add_weight(name, (out_features, in_features), self.weight, slice(None), columns)
        self.bias = parameters.replicated(f"{name}.bias", out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._parallel.size == 1:
            return linear_in_parts(x, self.weight) if self.bias is None else linear(x, self.weight, self.bias)
        out = self._parallel.all_reduce_sum(linear(x, self.weight))
        # Only after the sum: added on every rank before it, the bias would count once per rank.
        return out if self.bias is None else out + self.bias
