"""Linear layers split over the ranks as in Megatron-LM (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.weights.allocate import allocate
from minisgl.layers.weights.inputs import Input
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection


class ColumnParallelLinear:
    """Output features split over the ranks; several projections of one input are one matrix product.

    [T, in] to [T, rows of all projections, side by side]: a product of `weight`, to which the caller gives `bias`.
    """

    def __init__(
        self, parameters: Parameters, in_features: int, projections: Sequence[Projection], *, bias: bool
    ) -> None:
        self.weight = allocate(parameters, projections, in_features)
        self.bias = _new_bias(parameters, projections) if bias else None


def _new_bias(parameters: Parameters, projections: Sequence[Projection]) -> torch.Tensor:
    bias = parameters.new(sum(each.num_rows for each in projections))
    parts = bias.split([each.num_rows for each in projections])
    for each, into in zip(projections, parts, strict=True):
        parameters.add_source(f"{each.name}.bias", (each.out_features,), into, each.rows, order=each.order)
    return bias


class RowParallelLinear:
    """Input features split over the ranks; [T, in of this rank] to [T, out], summed over the ranks. With one rank and
    no bias the result may be partial sums, which the norm adds up."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        in_features: int,
        out_features: int,
        parallel: TensorParallel,
        *,
        bias: bool,
        in_parts: bool = True,
    ) -> None:
        """`in_parts`: the next norm can compute the sum."""
        self._parallel = parallel
        self._in_parts = in_parts
        projection = Projection(name, out_features, slice(0, out_features))
        self.weight = allocate(parameters, [projection], in_features, parallel.shard(in_features))
        self.bias = parameters.replicated(f"{name}.bias", out_features) if bias else None

    def forward(self, x: Input) -> torch.Tensor:
        if self._parallel.size == 1:
            return self.weight.product(x, self.bias, in_parts=self._in_parts)
        out = self._parallel.all_reduce_sum(self.weight.product(x))
        # Only after the sum: added on every rank before it, the bias would count once per rank.
        return out if self.bias is None else out + self.bias


def stacked(fused: str | None, projections: list[Projection]) -> list[Projection]:
    """Projections as a checkpoint stores them: with `fused`, all in one tensor of that name, one below the other."""
    if fused is None:
        return projections
    total, begin, found = sum(each.out_features for each in projections), 0, []
    for each in projections:
        rows = slice(begin + each.rows.start, begin + each.rows.stop)
        found.append(Projection(fused, total, rows, each.order))
        begin += each.out_features
    return found
