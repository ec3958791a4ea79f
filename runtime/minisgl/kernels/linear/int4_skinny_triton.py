"""x W^T with weights of 4 bits for a batch, as partial sums, also in groups of 32 inputs: operands of the kernels in
`int4_stream_k_gluon` and `int4_split_k_gluon` have one scale for 64. Weights are unpacked piece by piece, as for
experts in `grouped_gemm_triton`, and rounded once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.linear.dequantize_triton import load_piece
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece

# Functions that kernels of another file share name no constants of this module: see `dequantize_triton`.
assert (OUTPUTS, INPUTS, PIECE) == (64, 128, 1024)


class SkinnyTile(NamedTuple):
    """Work of a program: `rows` of x, 64 outputs and `each` steps of 128 inputs; `splits` programs share all inputs."""

    rows: int
    each: int
    splits: int


@triton.jit(do_not_specialize=["rows", "each"])
def _int4_skinny(
    x, words, scales, out, rows, outputs, each,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A step has GROUPS groups of inputs, W has STEPS steps."""
    start_next(PDL)
    wait_for_previous(PDL)
    # Programs that share rows of W are neighbours.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    split = tl.program_id(2)
    there = (row < rows)[None, :]
    row = row.to(tl.int64)
    inputs = x + row[None, :] * (STEPS * 128) + tl.arange(0, 128)[:, None]
    total = tl.zeros((64, ROWS), tl.float32)
    for step in range(split * each, tl.minimum(split * each + each, STEPS)):
        part = tl.load(inputs + step * 128, there, other=0.0)
        piece = load_piece(words, scales, (block * STEPS + step).to(tl.int64), GROUPS)
        total = tl.dot(piece.to(part.dtype), part, total)
    column = block * 64 + tl.arange(0, 64)
    tl.store(out + (split * rows + row)[None, :] * outputs + column[:, None], total, there)


def int4_skinny(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, tile: SkinnyTile) -> torch.Tensor:
    """x W^T of `x` [M, K] in 16 bits and W [N, K] as `words` and `scales` of `int4_packed`, as partial sums
    [splits, M, N] in float32."""
    rows, inputs = x.shape
    outputs, steps = len(words) * OUTPUTS, inputs // INPUTS
    assert x.is_contiguous() and (tile.splits - 1) * tile.each < steps <= tile.splits * tile.each
    out = torch.empty((tile.splits, rows, outputs), dtype=torch.float32, device=x.device)
    _int4_skinny[(triton.cdiv(rows, tile.rows), len(words), tile.splits)](
        x, words, scales, out, rows, outputs, tile.each, STEPS=steps, GROUPS=groups_in_piece(words, scales),
        ROWS=tile.rows, num_warps=4, num_stages=3, **dependent_launch(x.device),
    )  # fmt: skip
    return out
