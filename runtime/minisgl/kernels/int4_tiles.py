"""Choice of the kernel that computes a product with weights of 4 bits on a Hopper GPU, by its size."""

from __future__ import annotations

import functools
from typing import Final, TypeAlias

import torch

from minisgl.kernels.int4_batch_gluon import BatchTile, int4_batch
from minisgl.kernels.int4_few_rows_gluon import FewRowsTile, int4_few_rows
from minisgl.kernels.int4_words import INPUTS, OUTPUTS
from minisgl.kernels.sum_parts_triton import sum_parts

Int4Tile: TypeAlias = FewRowsTile | BatchTile

_FEW_ROWS: Final = 4
_MAX_ROWS: Final = 256
_WAVE: Final = 1056
"""Programs of two warps that run at the same time, each with 16 outputs of one row."""
_FEWEST_STEPS: Final = 4
"""Steps of 128 inputs of such a program: with fewer, adding up the parts takes longer than it saves."""
_MOST_STEPS: Final = 28
"""With more, another wave takes less time."""
_MOST_ROW_SPLITS: Final = 10
_AHEAD: Final = {5120: 2}
"""Steps of each warp that are read ahead for one row and many outputs, by inputs; 3 for others."""
_MANY_OUTPUTS: Final = 16384
"""A product with fewer outputs is split even if its consumer does not add up the parts."""
_MOST_ROWS: Final = {16: 16, 32: 32, 64: 64, 128: 128, 256: 256}
"""Most rows of x by the rows that a program multiplies, of a product with few outputs."""
_MOST_ROWS_OF_MANY: Final = {16: 16, 32: 32, 64: 104, 128: 256}
"""The same with many outputs: several programs share more rows, and a program with fewer takes longer."""
_COPIED_ROWS: Final = 64
"""Most rows in a copy with few outputs: the last copy begins with rows of the one before rather than read rows that x
does not have, which takes longer. With many outputs a second copy takes longer than that."""
_PROGRAMS: Final = {16: 528, 32: 528, 64: 528, 128: 264, 256: 264}
"""Programs that run at the same time, by the rows of x that a program multiplies."""
_MOST_SPLITS: Final = 6


@functools.cache
def int4_tile(rows: int, outputs: int, inputs: int, *, in_parts: bool) -> Int4Tile | None:
    """Tile with which a product is fastest, measured with benchmarks/int4_linear.py, or None where cuBLAS is, with
    dequantized weights. `in_parts`: the consumer adds up the parts of a tile with splits."""
    if rows > _MAX_ROWS:
        return None
    few = outputs < _MANY_OUTPUTS
    if rows == 1:
        if in_parts:
            return FewRowsTile(_row_splits(outputs, inputs), 2, 3)
        return FewRowsTile(1, 4, 3 if few else _AHEAD.get(inputs, 3))
    if rows <= _FEW_ROWS and not in_parts:
        return FewRowsTile(1, 4, 5)
    most_rows = _MOST_ROWS if few else _MOST_ROWS_OF_MANY
    tile_rows = next(size for size, most in most_rows.items() if rows <= most)
    programs = -(-rows // tile_rows) * (outputs // OUTPUTS)
    # All programs run at the same time, with two steps each or more.
    splits = max(min(_PROGRAMS[tile_rows] // programs, _MOST_SPLITS, inputs // INPUTS // 2), 1)
    return BatchTile(
        tile_rows,
        OUTPUTS,
        splits if in_parts or few else 1,
        *((3, 2) if tile_rows == 256 else (4, 4)),
        copied_rows=min(tile_rows, _COPIED_ROWS) if few else tile_rows,
    )


def _row_splits(outputs: int, inputs: int) -> int:
    """Splits for one row: as many as fill the fewest waves of programs in which none has too many steps."""
    steps = inputs // INPUTS
    most = max(min(steps // _FEWEST_STEPS, _MOST_ROW_SPLITS), 1)
    in_waves = (waves * _WAVE // (outputs // 16) for waves in range(1, most + 1))
    return next((splits for splits in in_waves if steps <= splits * _MOST_STEPS and splits <= most), most)


def int4_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    tile: Int4Tile,
    bias: torch.Tensor | None = None,
    *,
    in_parts: bool = False,
) -> torch.Tensor:
    """x W^T + bias of `x` [M, K] bfloat16, W [N, K] as `words` and `scales` of `int4_words`, and `bias` [N]: [M, N];
    `in_parts`, with several splits: their partial sums, [splits, M, N] in float32, without a bias."""
    assert not (in_parts and bias is not None)
    added = bias if tile.splits == 1 else None
    if isinstance(tile, BatchTile):
        product = int4_batch(x, words, scales, tile, added)
    else:
        product = int4_few_rows(x, words, scales, tile, added)
    return product if tile.splits == 1 or in_parts else sum_parts(product, x.dtype, bias)


def int4_gated(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """SiLU of the first half of the outputs of x W^T + bias × the rest, where one kernel does that, or None."""
    tile = int4_tile(len(x), len(words) * OUTPUTS, x.shape[1], in_parts=False)
    return int4_few_rows(x, words, scales, tile, bias, gated=True) if isinstance(tile, FewRowsTile) else None
