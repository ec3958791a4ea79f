"""Allocation of the weight of a linear layer: as the checkpoint stores it, where there are kernels for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.parameters import Parameters
from minisgl.layers.quantization import BLOCK, Fp8Blocks

Weight: TypeAlias = torch.Tensor | Fp8Weight


class Projection(NamedTuple):
    """One projection of a checkpoint and this rank's rows of it."""

    name: str
    out_features: int
    rows: slice


def new_weight(
    parameters: Parameters, projections: Sequence[Projection], in_features: int, columns: slice | None = None
) -> Weight:
    """Allocate the weight [rows of all projections, columns] and declare what fills it. FP8 blocks stay as they are if
    every projection has them and none is cut within a block; everything else becomes the model's dtype."""
    columns = slice(0, in_features) if columns is None else columns
    shape = sum(each.rows.stop - each.rows.start for each in projections), columns.stop - columns.start
    if _stays_fp8(parameters, projections, in_features, columns):
        weight = Fp8Weight(
            parameters.new(*shape, dtype=torch.float8_e4m3fn),
            parameters.new(shape[0] // BLOCK, shape[1] // BLOCK, dtype=torch.float32),
        )
        _declare_fp8(parameters, weight, projections, in_features, columns)
        return weight
    dense = parameters.new(*shape)
    begin = 0
    for name, out_features, rows in projections:
        end = begin + rows.stop - rows.start
        parameters.add_weight(name, (out_features, in_features), dense[begin:end], rows, columns)
        begin = end
    return dense


def _stays_fp8(
    parameters: Parameters, projections: Sequence[Projection], in_features: int, columns: slice
) -> bool:
    bounds = [in_features, columns.start, columns.stop]
    bounds += [bound for each in projections for bound in (each.out_features, each.rows.start, each.rows.stop)]
    return (
        has_fp8_kernels(parameters)
        and all(isinstance(parameters.format_of(each.name), Fp8Blocks) for each in projections)
        and all(bound % BLOCK == 0 for bound in bounds)
    )


def has_fp8_kernels(parameters: Parameters) -> bool:
    """Whether products with FP8 weights run on the device of these parameters: a Hopper GPU."""
    device = parameters.device
    return (
        device.type == "cuda"
        and parameters.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _declare_fp8(
    parameters: Parameters, weight: Fp8Weight, projections: Sequence[Projection], in_features: int, columns: slice
) -> None:
    begin = 0
    for name, out_features, rows in projections:
        end = begin + rows.stop - rows.start
        parameters.add_source(
            f"{name}.weight", (out_features, in_features), weight.values[begin:end], rows, columns, dtypes=("F8_E4M3",)
        )
        parameters.add_source(
            f"{name}.weight_scale_inv",
            (out_features // BLOCK, in_features // BLOCK),
            weight.scales[begin // BLOCK : end // BLOCK],
            _blocks(rows),
            _blocks(columns),
        )
        begin = end


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)
