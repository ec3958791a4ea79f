"""x W^T with weights of 4 bits for a batch on Hopper. Weights go from memory straight into the registers from which the
tensor cores take them, some steps ahead; the order of `int4_packed` puts into each thread's words the weights that it
multiplies. They become bfloat16 there, rounded once. Only x passes through shared memory.

Several programs share a multiprocessor: one unpacks weights while the tensor cores work for another.
"""

from typing import Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.launch.tensor_maps_gluon import tile_map
from minisgl.kernels.linear.dense_split_k_gluon import store_tile
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece

# Functions that kernels of another file share name no constants: see `int4_gemv_gluon`.
assert (OUTPUTS, PIECE) == (64, 1024)

_SLOT: Final = 64
"""Inputs of x in a slot of shared memory: half a step."""

# Two numbers at a time: 128 + q has q in the lowest bits of a bfloat16; minus 128 + zero point it is exact. The scale
# is the sum of two bfloat16, so that the product is rounded once.
_UNPACK = gl.constexpr("""{
.reg .b32 w, t, u;
lop3.b32 t, $8, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, $9;
mul.rn.bf16x2 u, t, $11;
fma.rn.bf16x2 t, t, $10, u;
mov.b32 {$0, $1}, t;
shr.u32 w, $8, 4;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, $9;
mul.rn.bf16x2 u, t, $11;
fma.rn.bf16x2 t, t, $10, u;
mov.b32 {$2, $3}, t;
shr.u32 w, $8, 8;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, $9;
mul.rn.bf16x2 u, t, $11;
fma.rn.bf16x2 t, t, $10, u;
mov.b32 {$4, $5}, t;
shr.u32 w, $8, 12;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, $9;
mul.rn.bf16x2 u, t, $11;
fma.rn.bf16x2 t, t, $10, u;
mov.b32 {$6, $7}, t;
}""")
# The same bfloat16 twice: the upper half of a float32, and what that half lacks.
_SPLIT_SCALE = gl.constexpr("""{
.reg .b32 h;
.reg .f32 l;
.reg .b16 lo;
and.b32 h, $2, 0xFFFF0000;
and.b32 $0, $2, 0xFFFFFFF0;
sub.rn.f32 l, $0, h;
cvt.rn.bf16.f32 lo, l;
mov.b32 $1, {lo, lo};
prmt.b32 $0, $2, 0, 0x3232;
}""")
_EIGHT = gl.constexpr((gl.bfloat16,) * 8)
_PIECE_OUTPUTS = gl.constexpr(OUTPUTS)


class BatchTile(NamedTuple):
    """Work of a program: `rows` of x times `outputs` rows of W; `splits` programs share all inputs."""

    rows: int
    outputs: int
    splits: int
    slots: int
    """Slots of shared memory, each for 64 inputs of x."""
    ahead: int
    """Steps of 128 inputs that W is read ahead."""
    copied_rows: int
    """Rows of x in a copy. Several copies for the rows of a program take longer than one, if x has all of the rows."""


@gluon.constexpr_function
def word_layout(warps):
    """Words [outputs, 2 × 32 inputs, 4 threads] as the tensor cores take what is in them."""
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    in_warps = [[16, 0, 0], [32, 0, 0], [64, 0, 0]][: 2 if warps == 4 else 3]
    return gl.DistributedLinearLayout([[0, 1, 0], [8, 0, 0]], lanes, in_warps, [], [16 * warps, 2, 4])


@gluon.jit
def load_words(words, n, step, steps, WARPS: gl.constexpr):
    """Load a step of 128 inputs and 16 × warps outputs from `n` on: [warps, 2, 128]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    piece = words + (n // 64 * steps + step).to(gl.int64) * 1024
    place = (warp // 4 * steps * 1024 + warp % 4 * 256)[:, None] + half[None, :] * 128
    at = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(piece + at, cache_modifier=".cg")


@gluon.jit
def _scale(scales, n, group, groups, there, WARPS: gl.constexpr):
    """Load the scales of a group, or zeros: [16 × warps outputs]."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, word_layout(WARPS)))
    output = gl.arange(0, 16 * WARPS, layout=layout)
    place = output // _PIECE_OUTPUTS * (groups * _PIECE_OUTPUTS) + output % _PIECE_OUTPUTS
    first = scales + (n // _PIECE_OUTPUTS * groups + group).to(gl.int64) * _PIECE_OUTPUTS
    return gl.load(first + place, there, other=0)


@gluon.jit
def _factors(scales, n, step, end, groups, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Load the scales of the groups of a step, or zeros from the end on."""
    there = step < end
    step = gl.minimum(step, end - 1)
    found = ()
    for group in gl.static_range(GROUPS):
        found = found + (_scale(scales, n, step * GROUPS + group, groups, there, WARPS),)
    return found


@gluon.jit
def halves(words, WARPS: gl.constexpr):
    """Words [warps, 2, 128] to those of the first and the last 64 inputs, [16 × warps, 2, 4] each."""
    # [warp, 8 outputs of 16, output of 8, thread of 4, 64 inputs, 32 inputs]
    words = gl.permute(gl.reshape(words, [WARPS, 2, 8, 4, 2, 2]), [0, 1, 2, 5, 3, 4])
    first, last = gl.split(gl.reshape(words, [16 * WARPS, 2, 4, 2]))
    layout: gl.constexpr = word_layout(WARPS)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(last, layout, assert_trivial=True),
    )


@gluon.jit
def _unpacked(words, scale, layout: gl.constexpr, WARPS: gl.constexpr):
    """Words [outputs, 2, 4] and scales [outputs] to bfloat16 [outputs, 64]."""
    high, low = gl.inline_asm_elementwise(
        _SPLIT_SCALE, "=r,=r,r", [scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    zero = ((scale & 15) | 0x4300) * 0x10001
    zero = gl.expand_dims(gl.expand_dims(zero, 1), 2)
    high = gl.expand_dims(gl.expand_dims(high, 1), 2)
    low = gl.expand_dims(gl.expand_dims(low, 1), 2)
    e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
        _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [words, zero, high, low], dtype=_EIGHT, is_pure=True, pack=1
    )
    pairs = gl.join(gl.join(gl.join(e0, e1), gl.join(e2, e3)), gl.join(gl.join(e4, e5), gl.join(e6, e7)))
    # [outputs, 32 inputs, thread of 4, bit 0 of the input, bit 3, bit 4]
    pairs = gl.reshape(gl.permute(pairs, [0, 1, 5, 4, 2, 3]), [16 * WARPS, 64])
    return gl.convert_layout(pairs, layout, assert_trivial=True)


@gluon.jit
def _fill(x, m, last, k, arrived, ring, slot, there, ROWS: gl.constexpr, COPIED: gl.constexpr):
    mbarrier.expect(arrived.index(slot), ROWS * 64 * 2, pred=there)
    for first in gl.static_range(0, ROWS, COPIED):
        part = ring.index(slot).slice(first, COPIED)
        tma.async_copy_global_to_shared(x, [gl.minimum(m + first, last), k], arrived.index(slot), part, pred=there)


@gluon.jit(do_not_specialize=["rows", "steps", "each"])
def _int4_batch(
    x, words, scales, bias, out, rows, outputs, steps, each,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`x` is a tensor map [rows, inputs] for copies of some rows, padded with zeros. A program computes `each` of the
    `steps` of 128 inputs; a step has GROUPS groups. Programs that share rows of W are neighbours."""
    WARPS: gl.constexpr = gl.num_warps()
    COPIED: gl.constexpr = x.block_shape[0]
    row_tiles = (rows + ROWS - 1) // ROWS
    m = gl.program_id(0) % row_tiles * ROWS
    # The last rows overlap others: rows that x does not have would cost more time than those that it has.
    last = gl.maximum(rows - COPIED, 0)
    n = gl.program_id(0) // row_tiles * (16 * WARPS)
    split = gl.program_id(1)
    begin = split * each
    # The last split may have fewer inputs than the others.
    end = gl.minimum(begin + each, steps)
    groups = steps * GROUPS

    # Steps behind the end have scales of 0.
    turns = (end - begin + AHEAD - 1) // AHEAD
    tiles = ()
    factors = ()
    for i in gl.static_range(AHEAD):
        tiles = tiles + (load_words(words, n, gl.minimum(begin + i, steps - 1), steps, WARPS),)
        factors = factors + (_factors(scales, n, begin + i, end, groups, GROUPS, WARPS),)
    ring = gl.allocate_shared_memory(x.dtype, [SLOTS, ROWS, 64], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(slot), count=1)
    fence_async_shared()
    start_next(PDL)
    wait_for_previous(PDL)
    for slot in gl.static_range(SLOTS):
        _fill(x, m, last, begin * 128 + slot * 64, arrived, ring, slot, slot < turns * AHEAD * 2, ROWS, COPIED)

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    total = gl.zeros([16 * WARPS, ROWS], gl.float32, layout=layout)
    slot = 0
    phase = 0
    for turn in range(turns):
        for i in gl.static_range(AHEAD):
            step = begin + turn * AHEAD + i
            both = halves(tiles[i], WARPS)
            for half in gl.static_range(2):
                weights = _unpacked(both[half], factors[i][half * (GROUPS - 1)], factor, WARPS)
                if half == 1:
                    # Into the registers that have just become free: a copy would wait for what is still on its way.
                    later = load_words(words, n, gl.minimum(step + AHEAD, steps - 1), steps, WARPS)
                    tiles = tiles[:i] + (later,) + tiles[i + 1 :]
                    later = _factors(scales, n, step + AHEAD, end, groups, GROUPS, WARPS)
                    factors = factors[:i] + (later,) + factors[i + 1 :]
                mbarrier.wait(arrived.index(slot), phase)
                total = warpgroup_mma(weights, ring.index(slot).permute((1, 0)), total, is_async=True)
                # In flight only until here: the next half is unpacked into the same registers.
                total, weights = warpgroup_mma_wait(0, deps=[total, weights])
                # All warps have read the slot before it is filled again.
                gl.thread_barrier()
                ahead = (turn * AHEAD + i) * 2 + half + SLOTS
                there = ahead < turns * AHEAD * 2
                _fill(x, m, last, begin * 128 + ahead * 64, arrived, ring, slot, there, ROWS, COPIED)
                slot += 1
                phase = gl.where(slot == SLOTS, phase ^ 1, phase)
                slot = gl.where(slot == SLOTS, 0, slot)
    if BIAS:
        columns = n + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, layout))
        total += gl.expand_dims(gl.load(bias + columns).to(gl.float32), 1)
    store_tile(total, out, m, last, n, rows, outputs, split * rows, COPIED, ROWS, 16 * WARPS, True)


def int4_batch(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, tile: BatchTile, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias of `x` [M, K] bfloat16, W [N, K] as `words` and `scales` of `int4_packed`, and `bias` [N]: [M, N];
    with several splits their partial sums, [splits, M, N] in float32, which have no bias."""
    rows, inputs = x.shape
    outputs, steps = len(words) * OUTPUTS, inputs // INPUTS
    assert outputs % tile.outputs == 0 and (bias is None or tile.splits == 1)
    assert groups_in_piece(words, scales) <= 2
    shape = (rows, outputs) if tile.splits == 1 else (tile.splits, rows, outputs)
    out = torch.empty(shape, dtype=x.dtype if tile.splits == 1 else torch.float32, device=x.device)
    _int4_batch[(triton.cdiv(rows, tile.rows) * (outputs // tile.outputs), tile.splits)](
        tile_map(x, tile.copied_rows, _SLOT), words, scales, x if bias is None else bias, out,
        rows, outputs, steps, triton.cdiv(steps, tile.splits), ROWS=tile.rows, SLOTS=tile.slots, AHEAD=tile.ahead,
        GROUPS=groups_in_piece(words, scales), BIAS=bias is not None, num_warps=tile.outputs // 16,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
