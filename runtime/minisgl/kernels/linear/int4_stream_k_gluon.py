"""x W^T with weights of 4 bits for up to 128 rows on Hopper, as partial sums.

Tiles of outputs rarely fill whole waves of programs: the 544 of gate and up of Qwen3-14B take two, where 528 programs
run at the same time. So those that fit run once and share the work equally, as in Stream-K (arXiv:2301.03598): a
program has a span of neighbouring steps, such as the last ones of a tile and the first ones of the next.

Weights go from memory straight into the registers from which the tensor cores take them, a turn of some steps ahead.
Minus their zero point they are exact in bfloat16; the sums of a group are multiplied with its scale in float32. Only x
passes through shared memory. Several programs share a multiprocessor: one unpacks weights while the tensor cores work
for another.
"""

from typing import NamedTuple

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
from minisgl.kernels.linear.int4_gemv_gluon import unpack_words
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece
from minisgl.kernels.linear.int4_split_k_gluon import halves, load_words, word_layout

# Functions of this file name no constants: see `int4_gemv_gluon`.
assert (OUTPUTS, INPUTS, PIECE) == (64, 128, 1024)


class SpansTile(NamedTuple):
    """Work of a program: a span of `each` turns, each of all rows of x, 16 outputs of each warp and `ahead` × 128
    inputs."""

    rows: int
    """Rows of x in shared memory."""
    ahead: int
    """Steps of 128 inputs in a turn."""
    slots: int
    """Turns of x in shared memory."""
    warps: int
    registers: int
    """Most registers of a thread."""
    each: int
    parts: int
    """Most programs that share the inputs of an output."""


@gluon.jit
def _load_scales(scales, n, step, STEPS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Load the scales of the groups of a step: [16 × warps outputs] each."""
    output = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, word_layout(WARPS))))
    place = output // 64 * (STEPS * GROUPS * 64) + output % 64
    found = ()
    for group in gl.static_range(GROUPS):
        first = scales + ((n // 64 * STEPS + step) * GROUPS + group).to(gl.int64) * 64
        found = found + (gl.load(first + place),)
    return found


@gluon.jit
def _load_step(
    words, scales, tile, turn, i: gl.constexpr, STEPS: gl.constexpr, AHEAD: gl.constexpr, GROUPS: gl.constexpr
):
    """Words and scales of step `i` of a turn. Behind the last step it is read again: x has zeros there."""
    WARPS: gl.constexpr = gl.num_warps()
    step = turn * AHEAD + i
    if STEPS % AHEAD:
        step = gl.minimum(step, STEPS - 1)
    n = tile * (16 * WARPS)
    return load_words(words, n, step, STEPS, WARPS), _load_scales(scales, n, step, STEPS, GROUPS, WARPS)


@gluon.jit
def _numbers(words, scale, layout: gl.constexpr, WARPS: gl.constexpr):
    """Words [outputs, 2, 4] to their numbers minus the zero point, [outputs, 64] in bfloat16."""
    zero = gl.expand_dims(gl.expand_dims(((scale & 15) | 0x4300) * 0x10001, 1), 2)
    numbers = gl.reshape(unpack_words(words, zero), [16 * WARPS, 64])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _share(scale, layout: gl.constexpr):
    """Scales [outputs] as factors [outputs, 1]."""
    share = (scale & -16).to(gl.float32, bitcast=True)
    return gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def _add_step(total, step, x, i: gl.constexpr, GROUPS: gl.constexpr):
    """`total` + the products of step `i` of a turn, [outputs, rows]. `x` is in shared memory, [rows, inputs]."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = total.type.layout
    words, scales = step
    first, last = halves(words, WARPS)
    x0 = x.slice(i * 128, 64, dim=1).permute((1, 0))
    x1 = x.slice(i * 128 + 64, 64, dim=1).permute((1, 0))
    none = gl.zeros_like(total)
    w0 = _numbers(first, scales[0], layout, WARPS)
    product = warpgroup_mma(w0, x0, none, is_async=True)
    w1 = _numbers(last, scales[GROUPS - 1], layout, WARPS)
    if GROUPS == 2:
        product, w0 = warpgroup_mma_wait(0, deps=[product, w0])
        total += product * _share(scales[0], layout)
        product = none
    product = warpgroup_mma(w1, x1, product, is_async=True)
    # The operands stay in their registers until here.
    product, w0, w1 = warpgroup_mma_wait(0, deps=[product, w0, w1])
    return total + product * _share(scales[GROUPS - 1], layout)


@gluon.jit
def _fill(x, turn, arrived, ring, slot, there):
    """Copy the inputs of a turn of all rows of x to shared memory, zeros behind the last ones."""
    mbarrier.expect(arrived.index(slot), x.block_shape[0] * x.block_shape[1] * 2, pred=there)
    at = [0, turn * x.block_shape[1]]
    tma.async_copy_global_to_shared(x, at, arrived.index(slot), ring.index(slot), pred=there)


@gluon.jit
def _store(out, total, tile, part, rows, outputs):
    layout: gl.constexpr = total.type.layout
    row = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    output = tile * total.shape[0] + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))
    at = (part * rows + row)[None, :] * outputs + output[:, None]
    gl.store(out + at, total, (row < rows)[None, :])


@gluon.jit(do_not_specialize=["rows", "outputs", "each", "parts"])
def _int4_spans(
    x, words, scales, out, rows, outputs, each, parts,
    STEPS: gl.constexpr, AHEAD: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x` is a tensor map for copies of a turn of all rows. A step has GROUPS groups; a tile has STEPS steps of
    16 × warps outputs, and turns of AHEAD steps."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = x.block_shape[0]
    TURNS: gl.constexpr = (STEPS + AHEAD - 1) // AHEAD
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, outputs // (16 * WARPS) * TURNS)
    tile = begin // TURNS
    turn = begin % TURNS
    steps = ()
    for i in gl.static_range(AHEAD):
        steps = steps + (_load_step(words, scales, tile, turn, i, STEPS, AHEAD, GROUPS),)
    ring = gl.allocate_shared_memory(x.dtype, [SLOTS, ROWS, AHEAD * 128], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    start_next(PDL)
    wait_for_previous(PDL)
    filled = turn
    for i in gl.static_range(SLOTS):
        _fill(x, filled, arrived, ring, i, begin + i < end)
        filled = gl.where(filled + 1 == TURNS, 0, filled + 1)

    total = gl.zeros([16 * WARPS, ROWS], gl.float32, layout=layout)
    for unit in range(begin, end):
        slot = (unit - begin) % SLOTS
        is_last = turn + 1 == TURNS
        next_tile = gl.where(is_last, tile + 1, tile)
        next_turn = gl.where(is_last, 0, turn + 1)
        # The last turn of the span is read again.
        more = unit + 1 < end
        read_tile = gl.where(more, next_tile, tile)
        read_turn = gl.where(more, next_turn, turn)
        mbarrier.wait(arrived.index(slot), (unit - begin) // SLOTS & 1)
        for i in gl.static_range(AHEAD):
            total = _add_step(total, steps[i], ring.index(slot), i, GROUPS)
            # Into the registers that have just become free: a copy would wait for what is still on its way.
            later = _load_step(words, scales, read_tile, read_turn, i, STEPS, AHEAD, GROUPS)
            steps = steps[:i] + (later,) + steps[i + 1 :]
        # All warps have read the slot before it is filled again.
        gl.thread_barrier()
        _fill(x, filled, arrived, ring, slot, unit + SLOTS < end)
        filled = gl.where(filled + 1 == TURNS, 0, filled + 1)
        if is_last | (unit + 1 == end):
            # Counted from the program that has the first turn of the tile.
            part = gl.program_id(0) - tile * TURNS // each
            _store(out, total, tile, part, rows, outputs)
            total = gl.zeros_like(total)
            if is_last:
                # Fewer programs may share this tile than another one.
                for missing in range(part + 1, parts):
                    _store(out, total, tile, missing, rows, outputs)
        tile = next_tile
        turn = next_turn


def int4_spans(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, tile: SpansTile) -> torch.Tensor:
    """x W^T of `x` [M, K] bfloat16 and W [N, K] as `words` and `scales` of `int4_packed`, as partial sums [parts, M, N]
    in float32."""
    rows, inputs = x.shape
    outputs, steps = len(words) * OUTPUTS, inputs // INPUTS
    assert rows <= tile.rows and outputs % (16 * tile.warps) == 0 and groups_in_piece(words, scales) <= 2
    out = torch.empty((tile.parts, rows, outputs), dtype=torch.float32, device=x.device)
    turns = outputs // (16 * tile.warps) * triton.cdiv(steps, tile.ahead)
    _int4_spans[(triton.cdiv(turns, tile.each),)](
        tile_map(x, tile.rows, tile.ahead * INPUTS), words, scales, out, rows, outputs, tile.each, tile.parts,
        STEPS=steps, AHEAD=tile.ahead, SLOTS=tile.slots, GROUPS=groups_in_piece(words, scales), num_warps=tile.warps,
        maxnreg=tile.registers, **dependent_launch(x.device),
    )  # fmt: skip
    return out
