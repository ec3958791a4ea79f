"""Allocation of weights: as the checkpoint stores them, where there are kernels for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.formats import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4Blocks, WeightFormat
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.int4 import Int4Weight
from minisgl.layers.weights.mxfp4 import Mxfp4Weight
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Matrix, Projection, QuantizedWeight, Stack, Weight

KINDS: Final[dict[type[WeightFormat], type[QuantizedWeight]]] = {
    Fp8Blocks: Fp8Weight,
    Fp8Channels: Fp8Weight,
    Int4Groups: Int4Weight,
    Mxfp4Blocks: Mxfp4Weight,
}
"""Class that reads each format, and keeps weights in it."""


class Experts(NamedTuple):
    """Weights of the experts of a layer, both of one kind."""

    gate_up: Weight
    """[experts, 2 N, hidden]: first the gates, then the gated values; without gates [experts, N, hidden]."""
    down: Weight
    """[experts, hidden, N]."""


class ExpertBiases(NamedTuple):
    """Biases of the experts of a layer."""

    gate_up: torch.Tensor
    """[experts, 2 N]."""
    down: torch.Tensor
    """[experts, hidden]. The first rank has it; on others it is zero."""


class ExpertNames(NamedTuple):
    """Names of the projections of an expert."""

    first: Sequence[str]
    """Gate, if there is one, and gated value."""
    down: str


def allocate(
    parameters: Parameters, projections: Sequence[Projection], in_features: int, columns: slice | None = None
) -> Weight:
    """Allocate the weight [rows of all projections, columns] and declare what fills it. It stays as it is stored if
    every projection has the same format, and its class has kernels for this part; else it becomes the model's dtype."""
    matrix = Matrix(projections, in_features, columns or slice(0, in_features))
    return _allocate(parameters, [matrix], _kept_format(parameters, [matrix], experts=False), experts=False)


def allocate_experts(
    parameters: Parameters, names: Sequence[ExpertNames], hidden: int, size: int, part: slice, *, keep: bool
) -> Experts:
    """The same for the experts with these names, of intermediate `size`, of which this rank holds `part`. `keep`: there
    may be kernels, which have SiLU."""
    gate_ups, downs = [], []
    for first, down in names:
        gate_ups.append(Matrix([Projection(each, size, part) for each in first], hidden, slice(0, hidden)))
        downs.append(Matrix([Projection(down, hidden, slice(0, hidden))], size, part))
    return _allocate_experts(parameters, gate_ups, downs, keep=keep)


def allocate_interleaved_experts(
    parameters: Parameters,
    name: str,
    count: int,
    hidden: int,
    size: int,
    parallel: TensorParallel,
    *,
    biased: bool,
) -> tuple[Experts, ExpertBiases | None]:
    """The same where a checkpoint stores the experts of a layer as one tensor, `{name}.gate_up_proj`, with gates and
    gated values in turn, and `{name}.down_proj`, and with `biased` their biases. Each is [in, out], unless it is
    quantized."""
    stored = parameters.format_of(f"{name}.down_proj")
    part = parallel.shard_of_blocks(size, stored.block if isinstance(stored, Mxfp4Blocks) else 1)
    gate_ups, downs = [], []
    rows = [slice(2 * part.start + odd, 2 * part.stop, 2) for odd in (0, 1)]
    for index in range(count):
        stack = Stack(index, count, transposed=stored is None)
        both = [Projection(f"{name}.gate_up_proj", 2 * size, of_part, stack=stack) for of_part in rows]
        gate_ups.append(Matrix(both, hidden, slice(0, hidden)))
        down = Projection(f"{name}.down_proj", hidden, slice(0, hidden), stack=stack)
        downs.append(Matrix([down], size, part))
    experts = _allocate_experts(parameters, gate_ups, downs, keep=True)
    if not biased:
        return experts, None
    half, width = _rows(experts.gate_up) // 2, part.stop - part.start
    gate_up_bias = parameters.new(count, 2 * half).zero_()
    down_bias = parameters.new(count, hidden).zero_()
    for index in range(count):
        stack = Stack(index, count)
        for place, of_part in zip((0, half), rows, strict=True):
            into = gate_up_bias[index, place : place + width]
            parameters.add_source(f"{name}.gate_up_proj_bias", (2 * size,), into, of_part, stack=stack)
        # Added on every rank, it would count once per rank: others take nothing of it.
        own = slice(0, 0 if parallel.rank else hidden)
        parameters.add_source(f"{name}.down_proj_bias", (hidden,), down_bias[index][own], own, stack=stack)
    return experts, ExpertBiases(gate_up_bias, down_bias)


def _rows(weight: Weight) -> int:
    return int(weight.shape[1] if isinstance(weight, QuantizedWeight) else weight.tensors[0].shape[1])


def _allocate_experts(
    parameters: Parameters, gate_ups: Sequence[Matrix], downs: Sequence[Matrix], *, keep: bool
) -> Experts:
    stored = _kept_format(parameters, [*gate_ups, *downs], experts=True) if keep else None
    return Experts(*(_allocate(parameters, each, stored, experts=True) for each in (gate_ups, downs)))


def allocate_stacked_experts(
    parameters: Parameters, gate_up: str, down: str, count: int, hidden: int, size: int, part: slice
) -> Experts:
    """The same for experts that a checkpoint has in two tensors, [count, 2 size, hidden] with the gates first and
    [count, hidden, size], which are not quantized. They become the model's dtype. Raises ModelError if config.json says
    that they are."""
    for name in (gate_up, down):
        stored = parameters.stored_format_of(name.removesuffix(".weight"))
        if stored is not None:
            raise ModelError(
                "quantized_checkpoint",
                f"{name} has all experts of a layer and is quantized, as {stored.name}; supported are such tensors in "
                "16 or 32 bits, and quantized experts in a tensor each",
            )
    width = part.stop - part.start
    both, outer = parameters.new(count, 2 * width, hidden), parameters.new(count, hidden, width)
    parameters.weights_by_type[parameters.dtype_name] += both.numel() + outer.numel()
    every = slice(0, count)
    for begin, into in ((0, both[:, :width]), (size, both[:, width:])):
        rows = slice(begin + part.start, begin + part.stop)
        parameters.add_source(gate_up, (count, 2 * size, hidden), into, every, rows)
    parameters.add_source(down, (count, hidden, size), outer, every, slice(0, hidden), part)
    return Experts(DenseWeight(both), DenseWeight(outer))


def _kept_format(parameters: Parameters, matrices: Sequence[Matrix], *, experts: bool) -> WeightFormat | None:
    """Format in which all of `matrices` stay; None: they become the model's dtype."""
    stored = parameters.format_of(matrices[0].projections[0].name)
    if stored is None or not parameters.keeps_quantized:
        return None
    formats = (parameters.format_of(each.name) for matrix in matrices for each in matrix.projections)
    keeps = KINDS[type(stored)].keeps
    same = all(each == stored for each in formats)
    same &= all(each.order is None for matrix in matrices for each in matrix.projections)
    return stored if same and all(keeps(stored, each, experts=experts) for each in matrices) else None


def _allocate(
    parameters: Parameters, matrices: Sequence[Matrix], stored: WeightFormat | None, *, experts: bool
) -> Weight:
    multiple = 1 if stored is None else KINDS[type(stored)].row_multiple
    places, rows = [], 0
    for projection in matrices[0].projections:
        places.append(slice(rows, rows + projection.num_rows))
        rows += -(-projection.num_rows // multiple) * multiple
    shape = *([len(matrices)] if experts else []), rows, matrices[0].shape[1]
    kept = None if stored is None else KINDS[type(stored)].new(parameters.new, stored, *shape)
    values = parameters.new(*shape) if kept is None else kept.values
    parameters.weights_by_type[parameters.dtype_name if kept is None else kept.type_name] += math.prod(shape)
    for index, matrix in enumerate(matrices):
        for projection, place in zip(matrix.projections, places, strict=True):
            part = kept
            if part is not None:
                part = (part.part(index) if experts else part).part(place)
            into = (values[index] if experts else values)[place] if part is None else part.values
            full = projection.out_features, matrix.in_features
            take, order = (projection.rows, matrix.columns), projection.order
            parameters.add_weight(projection.name, full, into, *take, kept=part, order=order, stack=projection.stack)
    return DenseWeight(values) if kept is None else kept
