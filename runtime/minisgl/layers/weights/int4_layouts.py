"""Numbers of 4 bits in the layouts of compressed-tensors, AWQ and GPTQ."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from minisgl.layers.weights.formats import Int4Groups
from minisgl.layers.weights.weight import ReadTensor, blocks, cut, finite

_BITS: Final = 4
_PACKED: Final = 8
"""Numbers of 4 bits in an int32."""
_AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 neighbouring output channels in AWQ's int32, in units of 4 bits."""


class Int4Numbers(NamedTuple):
    """Part of a weight of 4 bits."""

    numbers: torch.Tensor
    """[rows, columns] 0..15, int32."""
    zeros: torch.Tensor
    """[rows, groups] 0..15, int32: what stands for 0."""
    scales: torch.Tensor
    """[rows, groups]."""


def read_int4(weights: Int4Groups, read: ReadTensor, rows: slice, columns: slice) -> Int4Numbers:
    """Read the numbers of weights [rows, columns] of a layer, whatever the layout. Raises ValueError with the reason
    when the tensors contradict the format."""
    size = weights.group_size
    groups = blocks(columns, size)
    if weights.layout == "compressed-tensors":
        packed = read("weight_packed", rows, blocks(columns, _PACKED))
        numbers = cut(_unpack(packed, 1), 1, columns, _PACKED)
        scale = finite(read("weight_scale", rows, groups), "weight_scale")
        if weights.symmetric:
            zeros = torch.full_like(scale, 8, dtype=torch.int32)
        else:
            zeros = cut(_unpack(read("weight_zero_point", blocks(rows, _PACKED), groups), 0), 0, rows, _PACKED)
    else:
        scale = finite(read("scales", groups, rows), "scales").T
        qzeros = read("qzeros", groups, blocks(rows, _PACKED))
        if weights.layout == "awq":
            packed = read("qweight", columns, blocks(rows, _PACKED))
            numbers = cut(_unpack(packed, 1, _AWQ_NIBBLES), 1, rows, _PACKED).T
            zeros = cut(_unpack(qzeros, 1, _AWQ_NIBBLES), 1, rows, _PACKED).T
        else:
            _check_order(read("g_idx", columns), columns, size)
            numbers = cut(_unpack(read("qweight", blocks(columns, _PACKED), rows), 0), 0, columns, _PACKED).T
            zeros = cut(_unpack(qzeros, 1), 1, rows, _PACKED).T
            # A zero point of 0 is stored as 15.
            zeros = zeros if weights.plain_zeros else (zeros + 1) & 15
    return Int4Numbers(numbers, zeros, scale)


def _check_order(group_of: torch.Tensor, columns: slice, size: int) -> None:
    """Inputs must be in the order of their groups."""
    expected = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=group_of.device) // size
    if not torch.equal(group_of, expected):
        raise ValueError("g_idx reorders the inputs (act-order, desc_act), which is not supported")


def _unpack(packed: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(_PACKED))) -> torch.Tensor:
    """int32 to the numbers 0..15 in it, which follow each other in `dim`."""
    shifts = torch.tensor([_BITS * place for place in places], dtype=torch.int32, device=packed.device)
    numbers = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (packed.dim() - dim - 1))) & 15
    return numbers.flatten(dim, dim + 1)
