"""Quantized weights of a checkpoint to the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from minisgl.layers.quantization import BLOCK, Fp8Blocks, Fp8Channels, Int4Groups, WeightFormat
from minisgl.layers.quantize_channels import quantize_channels

Part = tuple[slice, ...]
ReadTensor = Callable[..., torch.Tensor]
"""Called with the suffix of a tensor's name and one slice per dimension; returns that part of the tensor."""

_BITS: Final = 4
_PACKED: Final = 8
"""Numbers of 4 bits in an int32."""
_AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 neighbouring output channels in AWQ's int32, in units of 4 bits."""
_ALL: Final = slice(None)


def dequantize(weights: WeightFormat, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
    """Weights [rows, columns] of a layer: those of the format's own tool, bit for bit, in the type of its scales.

    Raises ValueError with the reason when the tensors contradict the format.
    """
    if isinstance(weights, Fp8Blocks):
        return _fp8_blocks(read, rows, columns)
    if isinstance(weights, Fp8Channels) and weights.while_loading:
        values, scales = quantize_channels(read("weight", rows, columns))
        return values.float() * scales
    if isinstance(weights, Fp8Channels):
        scale = _finite(read("weight_scale", *(() if weights.per_tensor else (rows, _ALL))), "weight_scale")
        return read("weight", rows, columns).to(scale.dtype) * scale
    return _int4(weights, read, rows, columns)


def _fp8_blocks(read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
    scale = _finite(read("weight_scale_inv", _blocks(rows, BLOCK), _blocks(columns, BLOCK)), "weight_scale_inv").float()
    scale = _spread(_spread(scale, 0, rows, BLOCK), 1, columns, BLOCK)
    return read("weight", rows, columns).float() * scale


class Int4Numbers(NamedTuple):
    """Part of a weight of 4 bits."""

    numbers: torch.Tensor
    """[rows, columns] 0..15, int32."""
    zeros: torch.Tensor
    """[rows, groups] 0..15, int32: what stands for 0."""
    scales: torch.Tensor
    """[rows, groups]."""


def read_int4(weights: Int4Groups, read: ReadTensor, rows: slice, columns: slice) -> Int4Numbers:
    """Read the numbers of weights [rows, columns] of a layer, whatever the layout. Raises as `dequantize`."""
    size = weights.group_size
    groups = _blocks(columns, size)
    if weights.layout == "compressed-tensors":
        packed = read("weight_packed", rows, _blocks(columns, _PACKED))
        numbers = _cut(_unpack(packed, 1), 1, columns, _PACKED)
        scale = _finite(read("weight_scale", rows, groups), "weight_scale")
        if weights.symmetric:
            zeros = torch.full_like(scale, 8, dtype=torch.int32)
        else:
            zeros = _cut(_unpack(read("weight_zero_point", _blocks(rows, _PACKED), groups), 0), 0, rows, _PACKED)
    else:
        scale = _finite(read("scales", groups, rows), "scales").T
        qzeros = read("qzeros", groups, _blocks(rows, _PACKED))
        if weights.layout == "awq":
            packed = read("qweight", columns, _blocks(rows, _PACKED))
            numbers = _cut(_unpack(packed, 1, _AWQ_NIBBLES), 1, rows, _PACKED).T
            zeros = _cut(_unpack(qzeros, 1, _AWQ_NIBBLES), 1, rows, _PACKED).T
        else:
            _check_order(read("g_idx", columns), columns, size)
            numbers = _cut(_unpack(read("qweight", _blocks(columns, _PACKED), rows), 0), 0, columns, _PACKED).T
            zeros = _cut(_unpack(qzeros, 1), 1, rows, _PACKED).T
            # A zero point of 0 is stored as 15.
            zeros = zeros if weights.plain_zeros else (zeros + 1) & 15
    return Int4Numbers(numbers, zeros, scale)


def _int4(weights: Int4Groups, read: ReadTensor, rows: slice, columns: slice) -> torch.Tensor:
    numbers, zeros, scales = read_int4(weights, read, rows, columns)
    shifted = numbers - _spread(zeros, 1, columns, weights.group_size)
    return shifted.to(scales.dtype) * _spread(scales, 1, columns, weights.group_size)


def _check_order(group_of: torch.Tensor, columns: slice, size: int) -> None:
    """Inputs must be in the order of their groups."""
    expected = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=group_of.device) // size
    if not torch.equal(group_of, expected):
        raise ValueError("g_idx reorders the inputs (act-order, desc_act), which is not supported")


def _finite(scale: torch.Tensor, name: str) -> torch.Tensor:
    if not bool(scale.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite")
    return scale


def _unpack(packed: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(_PACKED))) -> torch.Tensor:
    """int32 to the numbers 0..15 in it, which follow each other in `dim`."""
    shifts = torch.tensor([_BITS * place for place in places], dtype=torch.int32, device=packed.device)
    numbers = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (packed.dim() - dim - 1))) & 15
    return numbers.flatten(dim, dim + 1)


def _blocks(part: slice, size: int) -> slice:
    """Blocks of `size` that contain `part`."""
    return slice(part.start // size, -(-part.stop // size))


def _spread(blocks: torch.Tensor, dim: int, part: slice, size: int) -> torch.Tensor:
    """Values of `_blocks(part)` to one per element of `part`."""
    return _cut(blocks.repeat_interleave(size, dim), dim, part, size)


def _cut(values: torch.Tensor, dim: int, part: slice, size: int) -> torch.Tensor:
    """Elements of `part` among those of `_blocks(part)`."""
    return values.narrow(dim, part.start % size, part.stop - part.start)
