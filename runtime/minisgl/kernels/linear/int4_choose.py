"""Choice of the kernel that computes a product with weights of 4 bits on a Hopper GPU, by its size; the first line that
fits, measured with benchmarks/int4_linear.py:

| rows, inputs | kernel | why |
|---|---|---|
| 1, also with SiLU × up | `int4_gemv_gluon` | weights go straight into the tensor cores' registers, loads ahead |
| 2 to 128, groups of 32 | `int4_skinny_triton` | has any group; not measured |
| 1 with 16,384 inputs, in parts; 2 to 128; groups of 64 or 128 | `int4_stream_k_gluon` | equal shares at once |
| 129 to 256, groups of 64 or 128 | `int4_split_k_gluon` | 302 µs a layer of 14B, two passes of the line before 346 |
| more | none | cuBLAS is faster, behind a pass that dequantizes weights |
"""

from __future__ import annotations

import functools
from typing import Final, TypeAlias

import torch

from minisgl.hopper import MULTIPROCESSORS, REGISTERS
from minisgl.kernels.linear.int4_gemv_gluon import RowTile, int4_row
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, groups_in_piece
from minisgl.kernels.linear.int4_skinny_triton import SkinnyTile, int4_skinny
from minisgl.kernels.linear.int4_split_k_gluon import BatchTile, int4_batch
from minisgl.kernels.linear.int4_stream_k_gluon import SpansTile, int4_spans
from minisgl.kernels.linear.split_k_sum_triton import sum_parts, sum_parts_gated

Int4Tile: TypeAlias = RowTile | SkinnyTile | SpansTile | BatchTile

_MAX_ROWS: Final = 256
_MANY_OUTPUTS: Final = 16384
"""A product with fewer outputs is split even if its consumer does not add up the parts."""

_MANY_INPUTS: Final = 16384
"""Inputs from which spans are faster for one row too, if the consumer adds up the parts."""
_WAVE: Final = 8 * MULTIPROCESSORS
"""Programs of two warps that run at the same time, each with 16 outputs of one row."""
_FEWEST_STEPS: Final = 4
"""Steps of 128 inputs of such a program: with fewer, adding up the parts takes longer than it saves."""
_MOST_STEPS: Final = 28
"""With more, another wave takes less time."""
_MOST_ROW_SPLITS: Final = 10
_AHEAD: Final = {5120: 2}
"""Steps of each warp that are read ahead for one row and many outputs, by inputs; 3 for others."""

_MOST_GROUPS: Final = 2
"""Groups in 128 inputs of `SpansTile` and `BatchTile`, at most."""
_MOST_SKINNY_ROWS: Final = 128
"""Rows up to which groups of 32 are multiplied piece by piece; with more, W is dequantized for cuBLAS. Not measured."""
_SKINNY_PROGRAMS: Final = 4 * MULTIPROCESSORS

_MOST_PARTS: Final = 8
"""Parts of an output: more take the consumer longer than the product gains from more programs."""

_PROGRAMS: Final = 2 * MULTIPROCESSORS
"""Programs of a batch that run at the same time."""
_MOST_SPLITS: Final = 6
_COPIED_ROWS: Final = 64
"""Rows in a copy with few outputs: the last copy begins with rows of the one before rather than read rows that x does
not have, which takes longer. With many outputs a second copy takes longer than that."""


@functools.cache
def int4_tile(rows: int, outputs: int, inputs: int, *, in_parts: bool, groups: int) -> Int4Tile | None:
    """Tile with which a product is fastest, measured with benchmarks/int4_linear.py, or None where cuBLAS is, with
    dequantized weights. `in_parts`: the consumer adds up the parts of a tile with splits. `groups`: groups of inputs in
    a piece of weights."""
    few = outputs < _MANY_OUTPUTS
    if rows == 1 and not in_parts:
        return RowTile(1, 4, 3 if few else _AHEAD.get(inputs, 3))
    if rows == 1 and (inputs < _MANY_INPUTS or groups > _MOST_GROUPS):
        return RowTile(_row_splits(outputs, inputs), 2, 3)
    if groups > _MOST_GROUPS:
        return _skinny_tile(rows, outputs, inputs) if rows <= _MOST_SKINNY_ROWS else None
    if rows <= 16:
        return spans_tile(16 if rows > 8 else 8, outputs, inputs, ahead=4, slots=2, warps=4, registers=128)
    if rows <= 32:
        return spans_tile(32, outputs, inputs, ahead=2, slots=2, warps=4, registers=128)
    if rows <= 64:
        return spans_tile(64, outputs, inputs, ahead=2, slots=2, warps=4, registers=168)
    if rows <= 128:
        warps = 4 if outputs % (2 * OUTPUTS) else 8
        return spans_tile(128, outputs, inputs, ahead=1, slots=3, warps=warps, registers=255)
    if rows > _MAX_ROWS:
        return None
    programs = (1 if few else -(-rows // 128)) * (outputs // OUTPUTS)
    # All programs run at the same time, with two steps each or more.
    splits = max(min(_PROGRAMS // programs, _MOST_SPLITS, inputs // INPUTS // 2), 1)
    if few:
        return BatchTile(256, OUTPUTS, splits, 3, 2, _COPIED_ROWS)
    return BatchTile(128, OUTPUTS, splits if in_parts else 1, 4, 4, 128)


def _row_splits(outputs: int, inputs: int) -> int:
    """Splits for one row: as many as fill the fewest waves of programs in which none has too many steps."""
    steps = inputs // INPUTS
    most = max(min(steps // _FEWEST_STEPS, _MOST_ROW_SPLITS), 1)
    in_waves = (waves * _WAVE // (outputs // 16) for waves in range(1, most + 1))
    return next((splits for splits in in_waves if steps <= splits * _MOST_STEPS and splits <= most), most)


def _skinny_tile(rows: int, outputs: int, inputs: int) -> SkinnyTile:
    """A tile with as many splits as fill the multiprocessors, each of which has some steps."""
    of_tile, steps = 16 if rows <= 16 else 32 if rows <= 32 else 64, inputs // INPUTS
    programs = -(-rows // of_tile) * (outputs // OUTPUTS)
    splits = max(min(_SKINNY_PROGRAMS // programs, _MOST_PARTS, steps // _FEWEST_STEPS), 1)
    each = -(-steps // splits)
    return SkinnyTile(of_tile, each, -(-steps // each))


def spans_tile(
    rows: int, outputs: int, inputs: int, *, ahead: int, slots: int, warps: int, registers: int
) -> SpansTile:
    """A tile whose programs run at the same time and share all turns equally."""
    programs = REGISTERS // (32 * warps * registers) * MULTIPROCESSORS
    tiles, turns = outputs // (16 * warps), -(-inputs // (INPUTS * ahead))
    # So that an output has no more parts than the limit.
    each = max(-(-tiles * turns // programs), -(-turns // (_MOST_PARTS - 1)))
    parts = max(((tile + 1) * turns - 1) // each - tile * turns // each + 1 for tile in range(tiles))
    return SpansTile(rows, ahead, slots, warps, registers, each, parts)


def int4_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    tile: Int4Tile,
    bias: torch.Tensor | None = None,
    *,
    in_parts: bool = False,
) -> torch.Tensor:
    """x W^T + bias of `x` [M, K] bfloat16, W [N, K] as `words` and `scales` of `int4_packed`, and `bias` [N]: [M, N];
    `in_parts`, with several splits: their partial sums, [splits, M, N] in float32, without a bias."""
    assert not (in_parts and bias is not None)
    if isinstance(tile, SpansTile):
        product = int4_spans(x, words, scales, tile)
    elif isinstance(tile, SkinnyTile):
        product = int4_skinny(x, words, scales, tile)
    elif isinstance(tile, BatchTile):
        product = int4_batch(x, words, scales, tile, bias if tile.splits == 1 else None)
    else:
        product = int4_row(x, words, scales, tile, bias if tile.splits == 1 else None)
    return product if product.dim() == 2 or in_parts else sum_parts(product, x.dtype, bias)


def int4_gated(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """SiLU of the first half of the outputs of x W^T + bias × the rest, where the kernel of the product, or of
    the sum of its parts, computes that, or None."""
    groups = groups_in_piece(words, scales)
    tile = int4_tile(len(x), len(words) * OUTPUTS, x.shape[1], in_parts=False, groups=groups)
    if isinstance(tile, RowTile):
        return int4_row(x, words, scales, tile, bias, gated=True)
    if isinstance(tile, SpansTile):
        return sum_parts_gated(int4_spans(x, words, scales, tile), x.dtype, bias)
    if isinstance(tile, SkinnyTile):
        return sum_parts_gated(int4_skinny(x, words, scales, tile), x.dtype, bias)
    return None
