# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""x W^T in FP8 on Hopper, with a scale per 128 inputs of a row of x and per block of 128 × 128 weights, or per row and
per output.

A step of the tensor cores is one block of inputs. Its result is scaled and added in float32 by ordinary instructions,
since the tensor cores keep only 14 bits of a sum of FP8 products. Up to 64 rows the product is one read of W and this
kernel comes closer to the bandwidth of the memory than cuBLAS (benchmarks/results/2026-11-23-h200-fp8-products);
fp8_batch_gluon has one for more rows.
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

from minisgl.kernels.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.dependent_launch_triton import dependent_launch
from minisgl.kernels.fp8_rows import BLOCK, Fp8Rows
from minisgl.kernels.tensor_maps_gluon import row_map, tile_map

_MAX_ROWS = 64
_MAX_ROWS_IN_PARTS = 128
_PROGRAMS = 176
"""Most programs to which splits may lead: about a third more than the GPU has multiprocessors."""
_MOST_SPLITS = 4
_SHARED_MEMORY = 104_000
"""Bytes for the stages of a program: two programs fit on a multiprocessor."""
_SHARED_MEMORY_MANY = 72_000
"""The same with more programs than two per multiprocessor: without a place for each, a second wave is nearly empty."""
_MOST_STAGES = 8
_FEW_PROGRAMS = 66


class Tile(NamedTuple):
    """Work of a program: `rows` of x times `outputs` rows of W; `splits` programs share all inputs."""

    rows: int
    outputs: int
    splits: int
    stages: int
    """Blocks of inputs that fit into shared memory."""


@gluon.jit(do_not_specialize=["rows", "steps"])
def _fp8_linear(
    x, w, x_scales, x_scale, w_scale, bias, out, rows, inputs, outputs, steps,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, CHANNELS: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`x` and `w` are tensor maps, padded with zeros; `x_scales` is that of the scales [inputs / 128, rows] of x,
    `w_scale` [outputs / 128, inputs / 128]; with CHANNELS `x_scale` [rows] and `w_scale` [outputs]. The tensor cores
    take 64 rows of W at a time, and all rows of x beside them."""
    INPUTS: gl.constexpr = 128
    # A copy ends at a multiple of 128 bytes of shared memory.
    SCALES: gl.constexpr = max(ROWS, 32)
    BYTES: gl.constexpr = (ROWS + OUTPUTS) * INPUTS + (0 if CHANNELS else SCALES * 4)
    warps: gl.constexpr = gl.num_warps()
    row_tiles = (rows + ROWS - 1) // ROWS
    m = gl.program_id(0) % row_tiles * ROWS
    n = gl.program_id(0) // row_tiles * OUTPUTS
    split = gl.program_id(1)
    blocks = inputs // INPUTS
    begin = split * steps
    # The last split may have fewer inputs than the others.
    steps = gl.minimum(steps, blocks - begin)

    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INPUTS], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, OUTPUTS, INPUTS], w.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [1 if CHANNELS else STAGES, 1, SCALES], x_scales.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(arrived.index(first), count=1)
    fence_async_shared()
    for first in gl.static_range(STAGES):
        there = first < steps
        mbarrier.expect(arrived.index(first), BYTES, pred=there)
        tma.async_copy_global_to_shared(
            w, [n, (begin + first) * INPUTS], arrived.index(first), w_ring.index(first), pred=there
        )
    start_next(PDL)
    wait_for_previous(PDL)
    for first in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [m, (begin + first) * INPUTS], arrived.index(first), x_ring.index(first), pred=first < steps
        )
        if not CHANNELS:
            # Scales that each thread loads would keep it waiting in every step.
            tma.async_copy_global_to_shared(
                x_scales, [begin + first, m], arrived.index(first), scale_ring.index(first), pred=first < steps
            )

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, ROWS, 32]
    )
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    there = row < rows
    w_scales = w_scale + n // INPUTS * blocks
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    zero = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    factor = 1.0
    if not CHANNELS:
        factor = gl.load(w_scales + begin)
    for step in range(steps):
        slot = step % STAGES
        next_factor = factor
        if not CHANNELS:
            next_factor = gl.load(w_scales + begin + gl.minimum(step + 1, steps - 1))
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        part = warpgroup_mma(w_ring.index(slot), x_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        if CHANNELS:
            total += part
        else:
            total += part * (scale_ring.index(slot).slice(0, ROWS, dim=1).load(layout) * factor)
        # All warps have read the stage before it is filled again.
        gl.thread_barrier()
        k = (begin + step + STAGES) * INPUTS
        more = step + STAGES < steps
        mbarrier.expect(arrived.index(slot), BYTES, pred=more)
        tma.async_copy_global_to_shared(w, [n, k], arrived.index(slot), w_ring.index(slot), pred=more)
        tma.async_copy_global_to_shared(x, [m, k], arrived.index(slot), x_ring.index(slot), pred=more)
        if not CHANNELS:
            tma.async_copy_global_to_shared(
                x_scales, [begin + step + STAGES, m], arrived.index(slot), scale_ring.index(slot), pred=more
            )
        factor = next_factor
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
    splits."""
    # cuBLAS reads rows of scales of W that are not aligned to 16 bytes from wrong addresses, without an error.
    if rows > (_MAX_ROWS_IN_PARTS if in_parts else _MAX_ROWS) and inputs // BLOCK % 4 == 0:
        return None
    tile_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    row_tiles = triton.cdiv(rows, tile_rows)
    many = row_tiles * (outputs // 128) >= _FEW_PROGRAMS
    tile_outputs = 128 if in_parts or (many and tile_rows < 64) else 64
    programs, splits = row_tiles * (outputs // tile_outputs), 1
    while in_parts and splits < _MOST_SPLITS and programs * 2 * splits <= _PROGRAMS and 2 * splits <= inputs // BLOCK:
        splits *= 2
    steps = triton.cdiv(inputs // BLOCK, splits)
    room = _SHARED_MEMORY_MANY if programs * splits > _PROGRAMS else _SHARED_MEMORY
    stages = min(room // ((tile_rows + tile_outputs) * BLOCK + 4 * max(tile_rows, 32)), _MOST_STAGES, steps)
    return Tile(tile_rows, tile_outputs, splits, stages)


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
        outputs, triton.cdiv(inputs // BLOCK, tile.splits),
        ROWS=tile.rows, OUTPUTS=tile.outputs, STAGES=tile.stages, CHANNELS=len(scales) == outputs,
        BIAS=bias is not None, num_warps=4, **dependent_launch(weight.device),
    )  # fmt: skip
    return out
