# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF005 (a kernel cannot unpack a list into another)
"""x W^T with weights of 4 bits on Hopper. Weights are copied to shared memory packed, and become bfloat16 in the
registers from which the tensor cores read them: the order of `int4_words` puts into each thread's words the weights
that it multiplies, so nothing moves between threads.

Up to some 64 rows the product is one read of W. Programs unpack their part of W once for all of their rows."""

import functools
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minisgl.kernels.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.dependent_launch_triton import dependent_launch

STEP: Final = 128
"""Inputs per stage."""

# Two numbers at a time: 128 + q has q in the lowest bits of a bfloat16; minus 128 + zero point it is exact.
_UNPACK = gl.constexpr("""{
.reg .b32 s, z, w, t;
prmt.b32 s, $9, 0, 0x1010;
prmt.b32 z, $9, 0, 0x3232;
lop3.b32 t, $8, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, z;
mul.rn.bf16x2 t, t, s;
mov.b32 {$0, $1}, t;
shr.u32 w, $8, 4;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, z;
mul.rn.bf16x2 t, t, s;
mov.b32 {$2, $3}, t;
shr.u32 w, $8, 8;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, z;
mul.rn.bf16x2 t, t, s;
mov.b32 {$4, $5}, t;
shr.u32 w, $8, 12;
lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 t, t, z;
mul.rn.bf16x2 t, t, s;
mov.b32 {$6, $7}, t;
}""")


_EIGHT = gl.constexpr((gl.bfloat16,) * 8)


class Int4Tile(NamedTuple):
    """Work of a program: `rows` of x times `outputs` rows of W; `splits` programs share all inputs."""

    rows: int
    outputs: int
    splits: int
    stages: int


_MAX_ROWS = 256
_PROGRAMS = 264
"""Programs that run at the same time: two per multiprocessor."""
_MOST_SPLITS = 4
_SHARED_MEMORY = 74_000
"""Bytes for the stages of a program: three programs fit on a multiprocessor."""
_SHARED_MEMORY_MANY_ROWS = 220_000
_MOST_STAGES = 8


@functools.cache
def int4_tile(rows: int, outputs: int, inputs: int, *, in_parts: bool) -> Int4Tile | None:
    """Tile with which `int4_linear` computes this product faster than cuBLAS does with dequantized weights, or None.
    `in_parts` allows a tile with splits."""
    if rows > _MAX_ROWS:
        return None
    tile_rows = min(max(triton.next_power_of_2(rows), 16), 128)
    row_tiles = triton.cdiv(rows, tile_rows)
    tile_outputs = 128 if tile_rows <= 64 and row_tiles * (outputs // 128) >= _PROGRAMS // 4 else 64
    programs, splits = row_tiles * (outputs // tile_outputs), 1
    while in_parts and splits < _MOST_SPLITS and programs * 2 * splits <= _PROGRAMS and 2 * splits <= inputs // STEP:
        splits *= 2
    steps = triton.cdiv(inputs // STEP, splits)
    room = _SHARED_MEMORY if tile_rows <= 64 else _SHARED_MEMORY_MANY_ROWS // 2
    stages = max(
        min(room // (tile_rows * STEP * 2 + tile_outputs * STEP // 2 + tile_outputs * 8), _MOST_STAGES, steps), 2
    )
    return Int4Tile(tile_rows, tile_outputs, splits, stages)


@gluon.jit
def _unpacked(words, scale, OUTPUTS: gl.constexpr, STEP: gl.constexpr, layout: gl.constexpr):
    """int32 [OUTPUTS, STEP / 8] to bfloat16 [OUTPUTS, STEP]; `scale` has a bfloat16 scale in its low half, and 128 +
    zero point in its high one."""
    e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
        _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale], dtype=_EIGHT, is_pure=True, pack=1
    )
    pairs = gl.join(
        gl.join(gl.join(e0, e1), gl.join(e2, e3)),
        gl.join(gl.join(e4, e5), gl.join(e6, e7)),
    )
    # [outputs, 32 inputs, thread of 4, bit 0 of the input, bit 3, bit 4]
    pairs = gl.reshape(pairs, [OUTPUTS, STEP // 32, 4, 2, 2, 2])
    pairs = gl.permute(pairs, [0, 1, 5, 4, 2, 3])
    return gl.convert_layout(gl.reshape(pairs, [OUTPUTS, STEP]), layout, assert_trivial=True)


@gluon.jit
def _words(ring, OUTPUTS: gl.constexpr, WORDS: gl.constexpr, layout: gl.constexpr):
    """Load a stage: [OUTPUTS, STEP / 8], in the order of `int4_words`."""
    MORE: gl.constexpr = [] if OUTPUTS == 64 else [[8, 0]]
    stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] + MORE, [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]], [[2, 0], [4, 0]], [],
        [OUTPUTS // 8, 128],
    )  # fmt: skip
    # [64 outputs, warp, row of 8, thread of 4, 8 rows of 16, 32 inputs]
    words = gl.reshape(ring.load(stored), [OUTPUTS // 64, 4, 8, 4, 2, 4])
    words = gl.reshape(gl.permute(words, [0, 1, 4, 2, 5, 3]), [OUTPUTS, WORDS])
    return gl.convert_layout(words, layout, assert_trivial=True)


@gluon.jit
def _scales(ring, OUTPUTS: gl.constexpr, WORDS: gl.constexpr, GROUPS: gl.constexpr, layout: gl.constexpr):
    """Load the scales of a stage: [OUTPUTS, STEP / 8] or [OUTPUTS, 1]."""
    first = ring.slice(0, 1, dim=0).permute((1, 0)).load(layout)
    if GROUPS == 1:
        return first
    else:
        word = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout)), 0)
        second = ring.slice(1, 1, dim=0).permute((1, 0)).load(layout)
        return gl.where(word < WORDS // 2, first, second)


@gluon.jit(do_not_specialize=["rows", "steps"])
def _int4_linear(
    x, w, scale, bias, out, rows, inputs, outputs, steps,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr,
    STEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x`, `w` and `scale` are tensor maps, padded with zeros: [rows, inputs], [outputs * inputs / 1024, 128] and
    [groups, outputs]. A stage has GROUPS groups."""
    BYTES: gl.constexpr = ROWS * STEP * 2 + OUTPUTS * STEP // 2 + OUTPUTS * GROUPS * 4
    WORDS: gl.constexpr = STEP // 8
    TILE: gl.constexpr = OUTPUTS // 8
    warps: gl.constexpr = gl.num_warps()
    row_tiles = (rows + ROWS - 1) // ROWS
    m = gl.program_id(0) % row_tiles * ROWS
    n = gl.program_id(0) // row_tiles * OUTPUTS
    split = gl.program_id(1)
    begin = split * steps
    # The last split may have fewer inputs than the others.
    steps = gl.minimum(steps, inputs // STEP - begin)
    # 128 outputs and 128 inputs are 16 rows of the map.
    tile = (n // 128 * (inputs // STEP) + begin) * 16 + n % 128 // 8

    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, STEP], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, TILE, 128], w.layout)
    scale_ring = gl.allocate_shared_memory(scale.dtype, [STAGES, GROUPS, OUTPUTS], scale.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(arrived.index(first), count=1)
    fence_async_shared()
    for first in gl.static_range(STAGES):
        there = first < steps
        barrier = arrived.index(first)
        mbarrier.expect(barrier, BYTES, pred=there)
        tma.async_copy_global_to_shared(w, [tile + first * 16, 0], barrier, w_ring.index(first), pred=there)
        tma.async_copy_global_to_shared(
            scale, [(begin + first) * GROUPS, n], barrier, scale_ring.index(first), pred=there
        )
    start_next(PDL)
    wait_for_previous(PDL)
    for first in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [m, (begin + first) * STEP], arrived.index(first), x_ring.index(first), pred=first < steps
        )

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, ROWS, 16]
    )
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # Words of a thread: those of its rows and inputs in a product of the tensor cores.
    MORE: gl.constexpr = [] if OUTPUTS == 64 else [[64, 0]]
    packed: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [8, 0]] + MORE, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [OUTPUTS, WORDS],
    )  # fmt: skip
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        words = _words(w_ring.index(slot), OUTPUTS, WORDS, packed)
        scale_of = _scales(scale_ring.index(slot), OUTPUTS, WORDS, GROUPS, packed)
        unpacked = _unpacked(words, scale_of, OUTPUTS, STEP, factor)
        # In flight only until here: otherwise ptxas waits behind each product of 16 inputs. Other programs unpack.
        total = warpgroup_mma(unpacked, x_ring.index(slot).permute((1, 0)), total, is_async=True)
        total, unpacked = warpgroup_mma_wait(0, deps=[total, unpacked])
        # All warps have read the stage before it is filled again.
        gl.thread_barrier()
        ahead = step + STAGES
        more = ahead < steps
        barrier = arrived.index(slot)
        mbarrier.expect(barrier, BYTES, pred=more)
        tma.async_copy_global_to_shared(w, [tile + ahead * 16, 0], barrier, w_ring.index(slot), pred=more)
        tma.async_copy_global_to_shared(
            scale, [(begin + ahead) * GROUPS, n], barrier, scale_ring.index(slot), pred=more
        )
        tma.async_copy_global_to_shared(x, [m, (begin + ahead) * STEP], barrier, x_ring.index(slot), pred=more)
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    columns = n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    if BIAS:
        total += gl.expand_dims(gl.load(bias + columns).to(gl.float32), 1)
    place = out + (split * rows + gl.expand_dims(row, 0)) * outputs + gl.expand_dims(columns, 1)
    gl.store(place, total.to(out.dtype.element_ty), mask=gl.expand_dims(row < rows, 0))


def int4_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, tile: Int4Tile, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias of `x` [M, K] bfloat16, W [N, K] as `words` and `scales` of `int4_words`, and `bias` [N]: [M, N];
    with several splits their partial sums, [splits, M, N] in float32, which have no bias."""
    rows, inputs = x.shape
    outputs = scales.shape[1]
    groups = len(scales) * STEP // inputs
    assert outputs % 128 == 0 and inputs % STEP == 0 and groups in (1, 2) and (bias is None or tile.splits == 1)
    shape = (rows, outputs) if tile.splits == 1 else (tile.splits, rows, outputs)
    out = torch.empty(shape, dtype=x.dtype if tile.splits == 1 else torch.float32, device=x.device)
    _int4_linear[(triton.cdiv(rows, tile.rows) * (outputs // tile.outputs), tile.splits)](
        _tiles(x, tile.rows, STEP, 128), _tiles(words.view(-1, 128), tile.outputs // 8, 128, 0),
        _tiles(scales, groups, tile.outputs, 0), x if bias is None else bias, out, rows, inputs, outputs,
        triton.cdiv(inputs // STEP, tile.splits), ROWS=tile.rows, OUTPUTS=tile.outputs, STAGES=tile.stages,
        GROUPS=groups, BIAS=bias is not None, STEP=STEP, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _tiles(matrix: torch.Tensor, rows: int, columns: int, swizzle: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
