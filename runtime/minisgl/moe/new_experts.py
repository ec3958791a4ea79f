"""Allocation of the weights of experts: in FP8 where the checkpoint stores all of a layer so and there are kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.new_weight import Projection, declare_blocks, kept_format
from minisgl.layers.parameters import Parameters
from minisgl.layers.quantization import BLOCK, Fp8Blocks


class Experts(NamedTuple):
    gate_up: torch.Tensor | Fp8Weight
    """[experts, 2 N, hidden]: first the gates, then the gated values."""
    down: torch.Tensor | Fp8Weight
    """[experts, hidden, N]."""


class _Part(NamedTuple):
    """Projections of one input of an expert, as `new_weight` takes them."""

    projections: list[Projection]
    in_features: int
    columns: slice


def new_experts(
    parameters: Parameters, name: str, count: int, hidden: int, size: int, part: slice, *, keep_fp8: bool
) -> Experts:
    """Allocate the weights of `count` experts `{name}.0` … of intermediate `size`, of which this rank holds `part`, and
    declare what fills them. `keep_fp8`: FP8 in blocks may stay as it is."""
    local = part.stop - part.start
    whole = slice(0, hidden)
    gate_ups, downs = [], []
    for index in range(count):
        expert = f"{name}.{index}"
        both = [Projection(f"{expert}.{which}", size, part) for which in ("gate_proj", "up_proj")]
        gate_ups.append(_Part(both, hidden, whole))
        downs.append(_Part([Projection(f"{expert}.down_proj", hidden, whole)], size, part))
    kept = keep_fp8 and all(isinstance(kept_format(parameters, *each), Fp8Blocks) for each in _all(gate_ups, downs))
    new = _new_blocks if kept else _new_dense
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


def _new_dense(parameters: Parameters, experts: list[_Part], outputs: int, inputs: int) -> torch.Tensor:
    weight = parameters.new(len(experts), outputs, inputs)
    parameters.weights_by_type[parameters.dtype_name] += weight.numel()
    for into, (projections, in_features, columns) in zip(weight, experts, strict=True):
        rows = into.split([each.rows.stop - each.rows.start for each in projections])
        for (layer, out_features, taken), place in zip(projections, rows, strict=True):
            parameters.add_weight(layer, (out_features, in_features), place, taken, columns)
    return weight
