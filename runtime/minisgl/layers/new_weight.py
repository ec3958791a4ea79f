"""Allocation of the weight of a linear layer: as the checkpoint stores it, where there are kernels for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from minisgl.kernels.int4_words import INPUTS, OUTPUTS, WORD
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.parameters import Parameters
from minisgl.layers.quantization import BLOCK, Fp8Blocks, Fp8Channels, Int4Groups, WeightFormat

Weight: TypeAlias = torch.Tensor | Fp8Weight | Int4Weight


class Projection(NamedTuple):
    """One projection of a checkpoint and this rank's rows of it."""

    name: str
    out_features: int
    rows: slice


def new_weight(
    parameters: Parameters, projections: Sequence[Projection], in_features: int, columns: slice | None = None
) -> Weight:
    """Allocate the weight [rows of all projections, columns] and declare what fills it. FP8 and INT4 stay as they
    are if every projection has the same kind and no block is cut; everything else becomes the model's dtype."""
    columns = slice(0, in_features) if columns is None else columns
    shape = sum(each.rows.stop - each.rows.start for each in projections), columns.stop - columns.start
    kept = kept_format(parameters, projections, in_features, columns)
    if isinstance(kept, Int4Groups):
        blocks = shape[0] // OUTPUTS
        packed = Int4Weight(
            parameters.new(blocks, shape[1] * OUTPUTS // WORD, dtype=torch.int32),
            parameters.new(blocks, shape[1] // kept.group_size * OUTPUTS, dtype=torch.int32),
        )
        declare_int4(parameters, packed, projections, in_features, columns)
        parameters.weights_by_type["int4"] += shape[0] * shape[1]
        return packed
    if kept is not None:
        scales = (shape[0] // BLOCK, shape[1] // BLOCK) if isinstance(kept, Fp8Blocks) else (shape[0], 1)
        weight = Fp8Weight(
            parameters.new(*shape, dtype=torch.float8_e4m3fn), parameters.new(*scales, dtype=torch.float32)
        )
        declare = declare_blocks if isinstance(kept, Fp8Blocks) else _declare_channels
        declare(parameters, weight, projections, in_features, columns)
        kind = "fp8-block" if isinstance(kept, Fp8Blocks) else "fp8-channel"
        parameters.weights_by_type[kind] += weight.values.numel()
        return weight
    dense = parameters.new(*shape)
    parameters.weights_by_type[parameters.dtype_name] += dense.numel()
    for (name, out_features, rows), part in _stacked(projections):
        parameters.add_weight(name, (out_features, in_features), dense[part], rows, columns)
    return dense


def kept_format(
    parameters: Parameters, projections: Sequence[Projection], in_features: int, columns: slice
) -> WeightFormat | None:
    """Format in which the weight stays; None: it becomes the model's dtype."""
    if not parameters.keeps_quantized:
        return None
    first, *others = (parameters.format_of(each.name) for each in projections)
    if any(other != first for other in others):
        return None
    if isinstance(first, Int4Groups):
        whole = all((each.rows.stop - each.rows.start) % OUTPUTS == 0 for each in projections)
        return first if whole and columns.start % INPUTS == 0 and columns.stop % INPUTS == 0 else None
    if isinstance(first, Fp8Channels):
        rows = sum(each.rows.stop - each.rows.start for each in projections)
        whole = rows % BLOCK == 0 and (columns.stop - columns.start) % BLOCK == 0
        return first if whole and first.has_kernels else None
    bounds = [in_features, columns.start, columns.stop]
    bounds += [bound for each in projections for bound in (each.out_features, each.rows.start, each.rows.stop)]
    return first if isinstance(first, Fp8Blocks) and all(bound % BLOCK == 0 for bound in bounds) else None


def declare_blocks(
    parameters: Parameters, weight: Fp8Weight, projections: Sequence[Projection], in_features: int, columns: slice
) -> None:
    """Declare what fills a weight in FP8 blocks: `rows` of each projection one below the other, and `columns`."""
    for (name, out_features, rows), part in _stacked(projections):
        parameters.add_source(
            f"{name}.weight", (out_features, in_features), weight.values[part], rows, columns, dtypes=("F8_E4M3",)
        )
        parameters.add_source(
            f"{name}.weight_scale_inv",
            (out_features // BLOCK, in_features // BLOCK),
            weight.scales[_blocks(part)],
            _blocks(rows),
            _blocks(columns),
        )


def declare_int4(
    parameters: Parameters, weight: Int4Weight, projections: Sequence[Projection], in_features: int, columns: slice
) -> None:
    """The same for a weight in INT4."""
    for (name, out_features, rows), part in _stacked(projections):
        blocks = slice(part.start // OUTPUTS, part.stop // OUTPUTS)
        shape = out_features, in_features
        parameters.add_quantized(name, shape, weight.words[blocks], weight.scales[blocks], rows, columns)


def _declare_channels(
    parameters: Parameters, weight: Fp8Weight, projections: Sequence[Projection], in_features: int, columns: slice
) -> None:
    for (name, out_features, rows), part in _stacked(projections):
        values, scales = weight.values[part], weight.scales[part]
        shape, kept = (out_features, in_features), parameters.format_of(name)
        if isinstance(kept, Fp8Channels) and kept.while_loading:
            parameters.add_quantized(name, shape, values, scales, rows, columns)
        else:
            parameters.add_source(f"{name}.weight", shape, values, rows, columns, dtypes=("F8_E4M3",))
            parameters.add_source(f"{name}.weight_scale", (out_features, 1), scales, rows)


def _stacked(projections: Sequence[Projection]) -> Iterator[tuple[Projection, slice]]:
    """Each projection and its rows in the weight, where one follows the other."""
    begin = 0
    for each in projections:
        end = begin + each.rows.stop - each.rows.start
        yield each, slice(begin, end)
        begin = end


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)
