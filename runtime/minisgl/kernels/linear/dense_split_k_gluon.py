"""x W^T for a decode batch on Hopper. For small batches such a product is one read of W; for a small W that takes less
time than a kernel launch and one memory latency. So a program fills its shared memory with its part of W while the
previous kernel still runs, and then only waits for x. About as many programs run as the GPU has multiprocessors: where
W has few rows, several programs share its columns, and each leaves a partial sum.

It is written in Gluon, Triton's lower level, because only there copies to shared memory can begin ahead of
`griddepcontrol.wait`.
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
from minisgl.kernels.launch.tensor_maps_gluon import tile_map

MIN_ROWS = 2
MAX_ROWS = 256

_LARGEST = 9 << 20
"""Most elements of W."""
_PROGRAMS = MULTIPROCESSORS
_FEW_PROGRAMS = 16
_MOST_SPLITS = 4
"""Most splits: more cost the next norm more time than they save here."""
_SHARED_MEMORY = SHARED_MEMORY - (35 << 10)
"""Bytes for the stages of a program, which leave space for kernels that run at the same time."""
_LINE = gl.constexpr(64)
"""Elements per cache line."""
_MOST_LINES = 16
"""Cache lines of a row of W that are prefetched."""


class Tile(NamedTuple):
    """Work of a program: `rows` of x times `outputs` rows of W, `inputs` at a time; `splits` programs share all
    inputs."""

    rows: int
    outputs: int
    inputs: int
    splits: int
    stages: int
    """Stages of `inputs` inputs that fit into shared memory."""
    warps: int
    early: int
    """Stages of W that are read before the previous kernel has finished."""


@gluon.jit
def _pull(weight, n, begin, inputs, OUTPUTS: gl.constexpr, LINES: gl.constexpr):
    """Prefetch lines of W from `begin` on to the L2 cache."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [warps, 1], [0, 1])
    rows = n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    columns = begin + gl.arange(0, LINES, layout=gl.SliceLayout(0, layout)) * _LINE
    columns = gl.minimum(columns, inputs - _LINE)
    lines = weight + (rows[:, None].to(gl.int64) * inputs + columns[None, :])
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _step(x, w, total, SWAP: gl.constexpr):
    """The tensor cores take 64 rows at a time from the first factor: W, if x has not as many."""
    if SWAP:
        return warpgroup_mma(w, x.permute((1, 0)), total, is_async=True)
    else:
        return warpgroup_mma(x, w.permute((1, 0)), total, is_async=True)


@gluon.jit
def _add_bias(total, bias, n, layout: gl.constexpr, OUTPUTS: gl.constexpr, SWAP: gl.constexpr):
    m_axis: gl.constexpr = 1 if SWAP else 0
    outputs_of = n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(m_axis, layout))
    return total + gl.expand_dims(gl.load(bias + outputs_of).to(gl.float32), m_axis)


@gluon.jit
def store_tile(
    value, out, m, last, n, rows, stride, first_row,
    COPIED: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Store ROWS rows from `m` on, which were copied COPIED at a time, from no later row on than `last`."""
    warps: gl.constexpr = gl.num_warps()
    VECTOR: gl.constexpr = 4
    ACROSS: gl.constexpr = min(OUTPUTS // VECTOR, 32)
    BY_COLUMNS: gl.constexpr = gl.BlockedLayout([VECTOR, 1], [ACROSS, 32 // ACROSS], [1, warps], [0, 1])
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [warps, 1], [1, 0])
    layout: gl.constexpr = BY_COLUMNS if SWAP else BY_ROWS
    m_axis: gl.constexpr = 0 if SWAP else 1
    n_axis: gl.constexpr = 1 if SWAP else 0
    value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(m_axis, layout))
    rows_of = gl.expand_dims(gl.minimum(m + row // COPIED * COPIED, last) + row % COPIED, m_axis)
    outputs_of = gl.expand_dims(n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(n_axis, layout)), n_axis)
    gl.store(out + (first_row + rows_of) * stride + outputs_of, value, mask=rows_of < rows)


@gluon.jit(do_not_specialize=["rows", "steps"])
def _batch_linear(
    x, w, weight, bias, out, rows, inputs, outputs, steps,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    LINES: gl.constexpr, SWAP: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x` and `w` are tensor maps, padded with zeros. Programs that share rows of W are neighbours. The barrier of a
    stage counts the bytes of both tiles."""
    BYTES: gl.constexpr = (ROWS + OUTPUTS) * INPUTS * 2
    warps: gl.constexpr = gl.num_warps()
    row_tiles = (rows + ROWS - 1) // ROWS
    m = gl.program_id(0) % row_tiles * ROWS
    n = gl.program_id(0) // row_tiles * OUTPUTS
    split = gl.program_id(1)
    begin = split * steps * INPUTS
    # The last split may have fewer inputs than the others.
    steps = gl.minimum(steps, (inputs - begin) // INPUTS)

    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INPUTS], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, OUTPUTS, INPUTS], w.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(arrived.index(first), count=1)
    fence_async_shared()
    for first in gl.static_range(EARLY):
        there = first < steps
        mbarrier.expect(arrived.index(first), BYTES, pred=there)
        tma.async_copy_global_to_shared(
            w, [n, begin + first * INPUTS], arrived.index(first), w_ring.index(first), pred=there
        )
    if (m == 0) & (steps > EARLY):
        _pull(weight, n, begin + EARLY * INPUTS, inputs, OUTPUTS, LINES)
    start_next(PDL)
    wait_for_previous(PDL)
    for first in gl.static_range(STAGES):
        there = first < steps
        k = begin + first * INPUTS
        if first >= EARLY:
            mbarrier.expect(arrived.index(first), BYTES, pred=there)
            tma.async_copy_global_to_shared(w, [n, k], arrived.index(first), w_ring.index(first), pred=there)
        tma.async_copy_global_to_shared(x, [m, k], arrived.index(first), x_ring.index(first), pred=there)

    FIRST: gl.constexpr = OUTPUTS if SWAP else ROWS
    SECOND: gl.constexpr = ROWS if SWAP else OUTPUTS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, SECOND, 16]
    )
    total = gl.zeros([FIRST, SECOND], gl.float32, layout=layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        total = _step(x_ring.index(slot), w_ring.index(slot), total, SWAP)
        total = warpgroup_mma_wait(1, deps=[total])
        # The stage that the previous iteration has read is free for the next copy.
        free = (step + STAGES - 1) % STAGES
        k = begin + (step + STAGES - 1) * INPUTS
        more = (step > 0) & (step + STAGES - 1 < steps)
        mbarrier.expect(arrived.index(free), BYTES, pred=more)
        tma.async_copy_global_to_shared(w, [n, k], arrived.index(free), w_ring.index(free), pred=more)
        tma.async_copy_global_to_shared(x, [m, k], arrived.index(free), x_ring.index(free), pred=more)
    total = warpgroup_mma_wait(0, deps=[total])
    if BIAS:
        total = _add_bias(total, bias, n, layout, OUTPUTS, SWAP)
    # The output reuses the memory of the stages: wait until all warps have read them.
    gl.thread_barrier()
    store_tile(total, out, m, m, n, rows, outputs, split * rows, ROWS, ROWS, OUTPUTS, SWAP)


def batch_tile(x: torch.Tensor, weight: torch.Tensor, *, in_parts: bool) -> Tile | None:
    """Tile with which `batch_linear` computes this product faster than cuBLAS, or None. `in_parts` allows a tile with
    splits."""
    fits = (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )
    return _choose(len(x), *weight.shape, in_parts=in_parts) if fits else None


@functools.cache
def _choose(rows: int, outputs: int, inputs: int, *, in_parts: bool) -> Tile | None:
    """Tile by size, measured with benchmarks/batch_linear.py: cuBLAS is as fast for large products."""
    if not MIN_ROWS <= rows <= MAX_ROWS or outputs * inputs > _LARGEST or outputs % 128 or inputs % 128:
        return None
    tile_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    row_tiles = triton.cdiv(rows, tile_rows)
    tile_outputs = 64 if row_tiles * outputs // 64 <= _PROGRAMS else 128
    programs = row_tiles * outputs // tile_outputs
    steps = inputs // 128
    splits = 1
    while in_parts and splits < _MOST_SPLITS and 2 * splits <= min(_PROGRAMS // programs, steps):
        splits *= 2
    steps = triton.cdiv(steps, splits)
    stages = min(_SHARED_MEMORY // ((tile_rows + tile_outputs) * 128 * 2), steps)
    # Few programs are enough where they read nearly all of W before the previous kernel has ended.
    fewest = _PROGRAMS // 3 if steps > stages + 1 else _FEW_PROGRAMS
    if not fewest <= programs * splits <= _PROGRAMS:
        return None
    return Tile(tile_rows, tile_outputs, 128, splits, stages, 4, stages)


def batch_linear(x: torch.Tensor, weight: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias of `x` [M, K] and `weight` [N, K], divisible by the tile, and `bias` [N]: [M, N]; with several
    splits their partial sums, [splits, M, N] in float32, which have no bias."""
    rows, inputs = x.shape
    outputs = len(weight)
    assert inputs % tile.inputs == 0 and outputs % tile.outputs == 0 and tile.early <= tile.stages
    assert bias is None or tile.splits == 1
    shape, dtype = ((rows, outputs), x.dtype) if tile.splits == 1 else ((tile.splits, rows, outputs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    steps = triton.cdiv(inputs // tile.inputs, tile.splits)
    lines = min(triton.next_power_of_2(steps * tile.inputs // 64), _MOST_LINES)
    _batch_linear[(triton.cdiv(rows, tile.rows) * (outputs // tile.outputs), tile.splits)](
        tile_map(x, tile.rows, tile.inputs), tile_map(weight, tile.outputs, tile.inputs), weight,
        weight if bias is None else bias, out, rows, inputs, outputs, steps, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, STAGES=tile.stages, EARLY=tile.early, LINES=lines, SWAP=tile.rows < 64,
        BIAS=bias is not None, num_warps=tile.warps, **dependent_launch(x.device),
    )  # fmt: skip
    return out
