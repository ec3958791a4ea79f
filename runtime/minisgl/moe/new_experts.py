"""Allocation of the weights of experts: as the checkpoint stores all of a layer, where there are kernels for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from minisgl.kernels.int4_words import OUTPUTS, WORD
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.new_weight import Projection, Weight, declare_blocks, declare_int4, kept_format
from minisgl.layers.parameters import Parameters
from minisgl.layers.quantization import BLOCK, Fp8Blocks, Int4Groups


class Experts(NamedTuple):
    gate_up: Weight
    """[experts, 2 N, hidden]: first the gates, then the gated values."""
    down: Weight
    """[experts, hidden, N]."""


class _Part(NamedTuple):
    """Projections of one input of an expert, as `new_weight` takes them."""

    projections: list[Projection]
    in_features: int
    columns: slice


def new_experts(
    parameters: Parameters, name: str, count: int, hidden: int, size: int, part: slice, *, keep: bool
) -> Experts:
    """Allocate the weights of `count` experts `{name}.0` … of intermediate `size`, of which this rank holds `part`, and
    declare what fills them. `keep`: FP8 in blocks and INT4 may stay as they are."""
    local = part.stop - part.start
    whole = slice(0, hidden)
    gate_ups, downs = [], []
    for index in range(count):
        expert = f"{name}.{index}"
        both = [Projection(f"{expert}.{which}", size, part) for which in ("gate_proj", "up_proj")]
        gate_ups.append(_Part(both, hidden, whole))
        downs.append(_Part([Projection(f"{expert}.down_proj", hidden, whole)], size, part))
    formats = {kept_format(parameters, *each) for each in _all(gate_ups, downs)} if keep else {None}
    kept = formats.pop() if len(formats) == 1 else None
    if isinstance(kept, Int4Groups):
        size = kept.group_size
        return Experts(
            _new_int4(parameters, gate_ups, 2 * local, hidden, size), _new_int4(parameters, downs, hidden, local, size)
        )
    new = _new_blocks if isinstance(kept, Fp8Blocks) else _new_dense
    return Experts(new(parameters, gate_ups, 2 * local, hidden), new(parameters, downs, hidden, local))


def _all(gate_ups: list[_Part], downs: list[_Part]) -> Iterator[_Part]:
    yield from gate_ups
    yield from downs


def _new_blocks(parameters: Parameters, experts: list[_Part], outputs: int, inputs: int) -> Fp8Weight:
    values = parameters.new(len(experts), outputs, inputs, dtype=torch.float8_e4m3fn)
    scales = parameters.new(len(experts), outputs // BLOCK, inputs // BLOCK, dtype=torch.float32)
    parameters.weights_by_type["fp8-block"] += values.numel()
    for index, expert in enumerate(experts):
        declare_blocks(parameters, Fp8Weight(values[index], scales[index]), *expert)
    return Fp8Weight(values, scales)


def _new_int4(parameters: Parameters, experts: list[_Part], outputs: int, inputs: int, group_size: int) -> Int4Weight:
    blocks = len(experts), outputs // OUTPUTS
    words = parameters.new(*blocks, inputs * OUTPUTS // WORD, dtype=torch.int32)
    scales = parameters.new(*blocks, inputs // group_size * OUTPUTS, dtype=torch.int32)
    parameters.weights_by_type["int4"] += len(experts) * outputs * inputs
    for index, expert in enumerate(experts):
        declare_int4(parameters, Int4Weight(words[index], scales[index]), *expert)
    return Int4Weight(words, scales)


def _new_dense(parameters: Parameters, experts: list[_Part], outputs: int, inputs: int) -> torch.Tensor:
    weight = parameters.new(len(experts), outputs, inputs)
    parameters.weights_by_type[parameters.dtype_name] += weight.numel()
    for into, (projections, in_features, columns) in zip(weight, experts, strict=True):
        rows = into.split([each.rows.stop - each.rows.start for each in projections])
        for (layer, out_features, taken), place in zip(projections, rows, strict=True):
            parameters.add_weight(layer, (out_features, in_features), place, taken, columns)
    return weight
