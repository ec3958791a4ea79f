"""x W^T in FP8 on Hopper, with a scale per 128 inputs of a row of x and per block of 128 × 128 weights, or per row and
per output.

A step of the tensor cores is one block of inputs. Its result is scaled and added in float32 by ordinary instructions,
since the tensor cores keep only 14 bits of a sum of FP8 products. Up to 64 rows the product is one read of W and this
kernel comes closer to the bandwidth of the memory than cuBLAS: for 17,408 inputs, 5,120 outputs and 64 rows it takes at
most 30 µs on an H200, cuBLAS 49, the bytes 21. It is the faster the more of W is on its way: all programs run at once
and fill shared memory. fp8_persistent_gluon has a kernel for more rows.
"""

import functools
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

from minisgl.hopper import MULTIPROCESSORS, SHARED_MEMORY
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.launch.tensor_maps_gluon import row_map, tile_map
from minisgl.kernels.pointwise.fp8_rows import BLOCK, Fp8Rows

_MAX_ROWS = 64
_MAX_ROWS_IN_PARTS = 128
_OUTPUTS = 64
"""Rows of W that the tensor cores take at a time."""
_PROGRAMS = 352
"""Most programs to which splits may lead: two to three per multiprocessor."""
_MOST_SPLITS = 4
_SHARED_MEMORY = SHARED_MEMORY - (6 << 10)
"""Bytes for blocks of a multiprocessor. All programs should run at once: another wave is nearly empty at the end."""
_MOST_BLOCKS = 12
"""Most blocks of inputs in the stages of a program."""
_MANY_ROWS_STAGES = 3
"""Stages for many rows: four programs run on a multiprocessor."""
_INPUTS = gl.constexpr(128)


class Tile(NamedTuple):
    """Work of a program: `rows` of x times `outputs` rows of W; `splits` programs share all inputs."""

    rows: int
    outputs: int
    splits: int
    together: int
    """Blocks of inputs in a stage. Their copies share a barrier, and their products are begun together."""
    stages: int
    """Stages in shared memory."""


@gluon.jit
def _copy_weights(w, n, block, ring, arrived, slot, there, BYTES: gl.constexpr, TOGETHER: gl.constexpr):
    """Begin to copy blocks of inputs of W to a stage, if they are `there`."""
    barrier = arrived.index(slot)
    mbarrier.expect(barrier, BYTES, pred=there)
    for i in gl.static_range(TOGETHER):
        place = [n, (block + i) * _INPUTS]
        tma.async_copy_global_to_shared(w, place, barrier, ring.index(slot * TOGETHER + i), pred=there)


@gluon.jit
def _copy_rows(
    x, x_scales, m, block, ring, scale_ring, arrived, slot, there, CHANNELS: gl.constexpr, TOGETHER: gl.constexpr
):  # fmt: skip
    """The same of x and its scales."""
    barrier = arrived.index(slot)
    for i in gl.static_range(TOGETHER):
        at = slot * TOGETHER + i
        tma.async_copy_global_to_shared(x, [m, (block + i) * _INPUTS], barrier, ring.index(at), pred=there)
        if not CHANNELS:
            # Scales that each thread loads would keep it waiting in every step.
            tma.async_copy_global_to_shared(x_scales, [block + i, m], barrier, scale_ring.index(at), pred=there)


@gluon.jit(do_not_specialize=["rows", "turns"])
def _fp8_linear(
    x, w, x_scales, x_scale, w_scale, bias, out, rows, inputs, outputs, turns,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr, CHANNELS: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x` and `w` are tensor maps, padded with zeros; `x_scales` is that of the scales [inputs / 128, rows] of x,
    `w_scale` [outputs / 128, inputs / 128]; with CHANNELS `x_scale` [rows] and `w_scale` [outputs]. The tensor cores
    take 64 rows of W at a time, and all rows of x beside them."""
    # A copy ends at a multiple of 128 bytes of shared memory.
    SCALES: gl.constexpr = max(ROWS, 32)
    BYTES: gl.constexpr = TOGETHER * ((ROWS + OUTPUTS) * _INPUTS + (0 if CHANNELS else SCALES * 4))
    warps: gl.constexpr = gl.num_warps()
    row_tiles = (rows + ROWS - 1) // ROWS
    m = gl.program_id(0) % row_tiles * ROWS
    n = gl.program_id(0) // row_tiles * OUTPUTS
    split = gl.program_id(1)
    blocks = inputs // _INPUTS
    begin = split * turns * TOGETHER
    # The last split may have fewer turns than the others. Copies fill the last stage with zeros behind the inputs.
    turns = gl.minimum(turns, (blocks - begin + TOGETHER - 1) // TOGETHER)

    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * TOGETHER, ROWS, _INPUTS], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES * TOGETHER, OUTPUTS, _INPUTS], w.layout)
    scales_shape: gl.constexpr = [1 if CHANNELS else STAGES * TOGETHER, 1, SCALES]
    scale_ring = gl.allocate_shared_memory(gl.float32, scales_shape, x_scales.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        _copy_weights(w, n, begin + stage * TOGETHER, w_ring, arrived, stage, stage < turns, BYTES, TOGETHER)
    start_next(PDL)
    wait_for_previous(PDL)
    for stage in gl.static_range(STAGES):
        block = begin + stage * TOGETHER
        _copy_rows(x, x_scales, m, block, x_ring, scale_ring, arrived, stage, stage < turns, CHANNELS, TOGETHER)

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, ROWS, 32]
    )
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    there = row < rows
    w_scales = w_scale + n // _INPUTS * blocks
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    zero = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    for turn in range(turns):
        slot = turn % STAGES
        block = begin + turn * TOGETHER
        factors = ()
        if not CHANNELS:
            for i in gl.static_range(TOGETHER):
                factors += (gl.load(w_scales + gl.minimum(block + i, blocks - 1)),)  # type: ignore[assignment]
        mbarrier.wait(arrived.index(slot), turn // STAGES & 1)
        parts = ()
        for i in gl.static_range(TOGETHER):
            x_block, w_block = x_ring.index(slot * TOGETHER + i), w_ring.index(slot * TOGETHER + i)
            part = warpgroup_mma(w_block, x_block.permute((1, 0)), zero, use_acc=False, is_async=True)
            parts += (part,)  # type: ignore[assignment]
        for i in gl.static_range(TOGETHER):
            # The sum is in the list lest the compiler adds several products at the end, for which it lacks registers.
            total, part = warpgroup_mma_wait(TOGETHER - 1 - i, deps=[total, parts[i]])
            if CHANNELS:
                total += part
            else:
                scales = scale_ring.index(slot * TOGETHER + i).slice(0, ROWS, dim=1).load(layout)
                total += part * (scales * factors[i])
        # All warps have read the stage before it is filled again.
        gl.thread_barrier()
        next_block = block + STAGES * TOGETHER
        more = turn + STAGES < turns
        _copy_weights(w, n, next_block, w_ring, arrived, slot, more, BYTES, TOGETHER)
        _copy_rows(x, x_scales, m, next_block, x_ring, scale_ring, arrived, slot, more, CHANNELS, TOGETHER)
    columns = n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    if CHANNELS:
        scale = gl.load(x_scale + row, mask=there, other=0.0)
        total *= gl.expand_dims(scale, 0) * gl.expand_dims(gl.load(w_scale + columns), 1)
    if BIAS:
        total += gl.expand_dims(gl.load(bias + columns).to(gl.float32), 1)
    place = out + (split * rows + gl.expand_dims(row, 0)) * outputs + gl.expand_dims(columns, 1)
    gl.store(place, total.to(out.dtype.element_ty), mask=gl.expand_dims(there, 0))


@functools.cache
def fp8_tile(rows: int, outputs: int, inputs: int, *, in_parts: bool) -> Tile | None:
    """Tile with which `fp8_linear` computes this product faster than cuBLAS, or None. `in_parts` allows a tile with
    splits. Up to 16, 32, 64 and 128 rows and beyond a product has one tile each, so that a warm-up reaches all."""
    # cuBLAS reads rows of scales of W that are not aligned to 16 bytes from wrong addresses, without an error.
    if rows > (_MAX_ROWS_IN_PARTS if in_parts else _MAX_ROWS) and inputs // BLOCK % 4 == 0:
        return None
    if rows > _MAX_ROWS_IN_PARTS:
        return Tile(64, _OUTPUTS, 1, 1, min(_MANY_ROWS_STAGES, inputs // BLOCK))
    tile_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    blocks = inputs // BLOCK
    programs, splits = triton.cdiv(rows, tile_rows) * (outputs // _OUTPUTS), 1
    while in_parts and splits < _MOST_SPLITS and programs * 2 * splits <= _PROGRAMS and 2 * splits <= blocks:
        splits *= 2
    room = _SHARED_MEMORY // triton.cdiv(programs * splits, MULTIPROCESSORS)
    block = (tile_rows + _OUTPUTS) * BLOCK + 4 * max(tile_rows, 32)
    of_split = triton.cdiv(blocks, splits)
    for together in (4, 2):
        stages = min(room // (together * block), _MOST_BLOCKS // together)
        if stages >= 2 and of_split >= 2 * together:
            return Tile(tile_rows, _OUTPUTS, splits, together, min(stages, triton.cdiv(of_split, together)))
    return Tile(tile_rows, _OUTPUTS, splits, 1, min(max(room // block, 2), of_split))


def fp8_linear(
    x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias of `x` [M, K], `weight` [N, K] with `scales` [N / 128, K / 128] or [N, 1] in float32, and `bias`
    [N]: [M, N] in bfloat16; with several splits their partial sums, [splits, M, N] in float32, which have no bias."""
    inputs, outputs = weight.shape[1], len(weight)
    assert inputs % BLOCK == 0 and outputs % tile.outputs == 0 and (bias is None or tile.splits == 1)
    assert x.per_row == (len(scales) == outputs) or inputs == BLOCK
    shape = (x.rows, outputs) if tile.splits == 1 else (tile.splits, x.rows, outputs)
    dtype = torch.bfloat16 if tile.splits == 1 else torch.float32
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    _fp8_linear[(triton.cdiv(x.rows, tile.rows) * (outputs // tile.outputs), tile.splits)](
        tile_map(x.values, tile.rows, BLOCK), tile_map(weight, tile.outputs, BLOCK),
        row_map(x.scales, max(tile.rows, 32)), x.scales, scales, scales if bias is None else bias, out, x.rows, inputs,
        outputs, triton.cdiv(triton.cdiv(inputs // BLOCK, tile.splits), tile.together),
        ROWS=tile.rows, OUTPUTS=tile.outputs, STAGES=tile.stages, TOGETHER=tile.together,
        CHANNELS=len(scales) == outputs, BIAS=bias is not None, num_warps=4, **dependent_launch(weight.device),
    )  # fmt: skip
    return out
