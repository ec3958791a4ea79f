"""x W^T in FP8 on Hopper for many rows, with a scale per 128 inputs of a row of x and per block of 128 × 128 weights.

One program per multiprocessor computes tile after tile. One warp copies blocks of 128 inputs ahead. Groups of four
warps multiply 64 rows × 128 outputs each: two the halves of a tile of 128 × 128 or, up to 64 rows, of 64 × 256, or
three the thirds of a tile of 192 × 128. Products are scaled and added in float32 block by block: the tensor cores keep
only 14 bits of a sum of FP8 products. One of two groups begins the product of a block before it adds the last one. One
of three has too few registers for that, and adds while the others multiply.

Where the tiles are no multiple of the programs, several programs share the inputs of each of the remaining ones. They
do so first, and add the partial sums up last, each its part of the tile and always in the same order. So hardly any
program waits for another.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
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
from minisgl.kernels.launch.tensor_maps_gluon import row_map, tile_map
from minisgl.kernels.pointwise.fp8_rows import BLOCK, Fp8Rows

_HALF = gl.constexpr(64)
_BLOCK = gl.constexpr(128)
_TOGETHER = gl.constexpr(4)
"""Blocks of inputs in a turn of the loop, at whose end no product is under way."""
_ROW_TILES = gl.constexpr(16)
"""Tiles of rows that take the same weights one after the other, from the L2 cache."""
_STAGES = {1: 4, 2: 5, 3: 4}
"""Blocks of inputs that fit into shared memory, by groups of 64 rows in a tile."""
_FEWEST_ROWS = 33
_MOST_SPLITS = 16
_MOST_WAVES = 2
"""Most parts of tiles per program."""
_PART_BLOCKS = 12
"""Blocks that a program could multiply in the time in which it stores and adds up partial sums."""
_BLOCK_TIME = {1: 1.9, 2: 1.15, 3: 1.55}
"""Time of a block in relation to one of 128 × 128 in cuBLAS, by groups of 64 rows in a tile. In cuBLAS several programs
receive the same rows or weights together."""
_MOST_CELLS = 3
"""Most products of 64 rows × 128 outputs in a tile."""
_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Registers of a thread at the launch; groups of warps then pass them on to those that multiply."""
_OF_TWO = gl.constexpr(240)
_OF_THREE = gl.constexpr(160)
_COPYING = gl.constexpr(24)


class Share(NamedTuple):
    """Work of all programs in tiles of `tall` times 64 rows: `whole` tiles, each by one program, and others in `parts`,
    `splits` for each tile, of `blocks` blocks of inputs."""

    tall: int
    whole: int
    parts: int
    splits: int
    blocks: int


@gluon.jit
def _units(whole, parts):
    """Numbers of units: parts come first, and each program counts as many of them."""
    programs = gl.num_programs(0)
    return (parts + programs - 1) // programs * programs + whole


@gluon.jit
def _place(unit, row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks):
    """Row tile and output tile of a unit of work, its first block of inputs, and its turns of the loop: none where a
    program has no part. Blocks behind the last one are zeros."""
    part_units = _units(0, parts)
    is_part = unit < part_units
    tile = gl.where(is_part, whole + unit // splits, unit - part_units)
    begin = gl.where(is_part, unit % splits * part_blocks, 0)
    count = gl.where(is_part, gl.minimum(part_blocks, blocks - begin), blocks)
    count = gl.where(is_part & (unit >= parts), 0, count)
    together = _ROW_TILES * output_tiles
    first = tile // together * _ROW_TILES
    size = gl.minimum(row_tiles - first, _ROW_TILES)
    return first + tile % together % size, tile % together // size, begin, (count + _TOGETHER - 1) // _TOGETHER


@gluon.jit
def _first_row(m, half, rows, TALL: gl.constexpr):
    """First of 64 rows. The last ones overlap those before: copies of rows that are not there take longer than others.
    Copies of scales begin at multiples of 16 bytes; memory is padded to 16 rows."""
    return gl.maximum(gl.minimum((m * TALL + half) * _HALF, (rows + 15) // 16 * 16 - _HALF), 0)


@gluon.jit
def _copy_blocks(memory, rings, work, rows, TALL: gl.constexpr, STAGES: gl.constexpr):
    """Copy the blocks of all units of this program. The weights of the first ones are on their way already."""
    x, w, x_scales = memory
    x_ring, w_ring, scale_ring, arrived, free = rings
    row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks = work
    WIDE: gl.constexpr = 2 if TALL == 1 else 1
    BYTES: gl.constexpr = TALL * _HALF * (_BLOCK + 4) + WIDE * _BLOCK * _BLOCK
    count = 0
    for unit in range(gl.program_id(0), _units(whole, parts), gl.num_programs(0)):
        m, n, begin, turns = _place(unit, row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks)
        early = gl.where(unit == gl.program_id(0), gl.minimum(turns * _TOGETHER, STAGES), 0)
        for block in range(turns * _TOGETHER):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), count // STAGES & 1 ^ 1)
            k = (begin + block) * _BLOCK
            late = block >= early
            mbarrier.expect(arrived.index(slot), BYTES, pred=late)
            for i in gl.static_range(WIDE):
                output = (n * WIDE + i) * _BLOCK
                tma.async_copy_global_to_shared(
                    w, [output, k], arrived.index(slot), w_ring.index(WIDE * slot + i), pred=late
                )
            for i in gl.static_range(TALL):
                row = _first_row(m, i, rows, TALL)
                tma.async_copy_global_to_shared(x, [row, k], arrived.index(slot), x_ring.index(TALL * slot + i))
                place = [begin + block, row]
                tma.async_copy_global_to_shared(x_scales, place, arrived.index(slot), scale_ring.index(TALL * slot + i))
            count += 1


@gluon.jit
def _multiply(rings, count, zero, CELL: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr):
    """Begin the product of a block, once it is there."""
    x_ring, w_ring, _, arrived, _ = rings
    WIDE: gl.constexpr = 2 if TALL == 1 else 1
    slot = count % STAGES
    mbarrier.wait(arrived.index(slot), count // STAGES & 1)
    rows = x_ring.index(TALL * slot + CELL // WIDE)
    weights = w_ring.index(WIDE * slot + CELL % WIDE)
    return warpgroup_mma(rows, weights.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add(
    total, part, factor, rings, count, OTHERS: gl.constexpr, CELL: gl.constexpr, TALL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Wait for a product, while OTHERS may go on, and add it."""
    _, _, scale_ring, _, free = rings
    slot = count % STAGES
    scales = scale_ring.index(TALL * slot + (CELL if TALL > 1 else 0))
    of_rows = scales.permute((1, 0)).load(total.type.layout) * factor
    part = warpgroup_mma_wait(OTHERS, deps=[part])
    mbarrier.arrive(free.index(slot))
    total += part * of_rows
    # Else the compiler adds products later, while others are under way, and has too few registers for all.
    return warpgroup_mma_wait(OTHERS, deps=[total])


@gluon.jit
def _add_parts(sums, counter, out, unit, row, column, splits, rows, outputs, CELL: gl.constexpr, CELLS: gl.constexpr):
    """Add up some of the rows from `row` on, eight at a time, after all programs that share the tile have stored their
    sums. The last one sets the counter to zero."""
    SIZE: gl.constexpr = _HALF * _BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    entry = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, layout)), 1)
    inner = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, layout)), 0)
    while gl.atomic_add(counter, 0, sem="acquire") < splits:
        pass
    first = unit // splits * splits
    for eight in range(unit % splits, _HALF // 8, splits):
        inside = eight * (8 * _BLOCK) + entry * 8 + inner
        total = gl.zeros([128, 8], gl.float32, layout=layout)
        for split in range(splits):
            # Not from the L1 cache, which may hold older values.
            place = sums + ((first + split) * CELLS + CELL).to(gl.int64) * SIZE + inside
            total += gl.load(place, cache_modifier=".cg")
        rows_of = row + eight * 8 + entry % 8
        columns_of = column + entry // 8 * 8 + inner
        place = out + (rows_of.to(gl.int64) * outputs + columns_of)
        gl.store(place, total.to(gl.bfloat16), mask=rows_of < rows)
    gl.thread_barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == 2 * splits - 1:
        gl.store(counter, 0)


@gluon.jit
def _multiply_units(
    CELL: gl.constexpr, memory, rings, work, rows, outputs, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute a cell of each unit of this program: 64 rows × 128 outputs."""
    w_scales, out, out_tiles, staging, sums, counters = memory
    row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks = work
    WIDE: gl.constexpr = 2 if TALL == 1 else 1
    CELLS: gl.constexpr = TALL * WIDE
    X_CELL: gl.constexpr = CELL // WIDE
    W_CELL: gl.constexpr = CELL % WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _BLOCK, 32])
    zero = gl.zeros([_HALF, _BLOCK], gl.float32, layout=layout)
    in_cell = gl.expand_dims(gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, layout)), 0)
    programs = gl.num_programs(0)
    last = blocks - 1
    count = 0
    for unit in range(gl.program_id(0), _units(whole, parts), programs):
        m, n, begin, turns = _place(unit, row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks)
        if turns > 0:
            scales = w_scales + (n * WIDE + W_CELL) * blocks
            total = zero
            if CELLS == 2:
                for turn in range(turns):
                    k = begin + turn * _TOGETHER
                    factor0 = gl.load(scales + k)
                    factor1 = gl.load(scales + gl.minimum(k + 1, last))
                    factor2 = gl.load(scales + gl.minimum(k + 2, last))
                    factor3 = gl.load(scales + gl.minimum(k + 3, last))
                    part0 = _multiply(rings, count, zero, CELL, TALL, STAGES)
                    part1 = _multiply(rings, count + 1, zero, CELL, TALL, STAGES)
                    total = _add(total, part0, factor0, rings, count, 1, CELL, TALL, STAGES)
                    part2 = _multiply(rings, count + 2, zero, CELL, TALL, STAGES)
                    total = _add(total, part1, factor1, rings, count + 1, 1, CELL, TALL, STAGES)
                    part3 = _multiply(rings, count + 3, zero, CELL, TALL, STAGES)
                    total = _add(total, part2, factor2, rings, count + 2, 1, CELL, TALL, STAGES)
                    total = _add(total, part3, factor3, rings, count + 3, 0, CELL, TALL, STAGES)
                    count += _TOGETHER
            else:
                for block in range(begin, begin + turns * _TOGETHER):
                    factor = gl.load(scales + gl.minimum(block, last))
                    part = _multiply(rings, count, zero, CELL, TALL, STAGES)
                    total = _add(total, part, factor, rings, count, 0, CELL, TALL, STAGES)
                    count += 1
            row = _first_row(m, X_CELL, rows, TALL)
            column = (n * WIDE + W_CELL) * _BLOCK
            if unit < parts:
                # In blocks of 8 × 8, which are consecutive in the registers of a warp.
                inside = (in_cell // 8 * (_BLOCK // 8) + columns // 8) * 64 + in_cell % 8 * 8 + columns % 8
                gl.store(sums + (unit * CELLS + CELL).to(gl.int64) * (_HALF * _BLOCK) + inside, total)
                gl.thread_barrier()
                gl.atomic_add(counters + unit // splits * CELLS + CELL, 1, sem="release")
            else:
                # The tile before must have left the buffer.
                tma.store_wait(0)
                gl.thread_barrier()
                staging.index(CELL).store(total.to(gl.bfloat16))
                fence_async_shared()
                tma.async_copy_shared_to_global(out_tiles, [row, column], staging.index(CELL))
    tma.store_wait(0)
    for unit in range(gl.program_id(0), parts, programs):
        m, n, begin, turns = _place(unit, row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks)
        row = _first_row(m, X_CELL, rows, TALL)
        column = (n * WIDE + W_CELL) * _BLOCK
        counter = counters + unit // splits * CELLS + CELL
        _add_parts(sums, counter, out, unit, row, column, splits, rows, outputs, CELL, CELLS)


@gluon.jit(do_not_specialize=["rows", "whole", "parts", "splits", "part_blocks"])
def _fp8_batch(
    x, w, x_scales, w_scales, out, out_tiles, sums, counters, rows, inputs, outputs, whole, parts, splits, part_blocks,
    TALL: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x`, `w` and `out_tiles` are tensor maps, `x_scales` is that of the scales [inputs / 128, rows] of x; `w_scales`
    [outputs / 128, inputs / 128]. `sums` has room for a float32 tile for each part, `counters` a zero for each cell of
    a tile in parts, which it leaves so."""
    WIDE: gl.constexpr = 2 if TALL == 1 else 1
    BYTES: gl.constexpr = TALL * _HALF * (_BLOCK + 4) + WIDE * _BLOCK * _BLOCK
    row_tiles = (rows + TALL * _HALF - 1) // (TALL * _HALF)
    output_tiles = outputs // (WIDE * _BLOCK)
    blocks = inputs // _BLOCK
    x_ring = gl.allocate_shared_memory(x.dtype, [TALL * STAGES, _HALF, _BLOCK], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [WIDE * STAGES, _BLOCK, _BLOCK], w.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [TALL * STAGES, 1, _HALF], x_scales.layout)
    staging = gl.allocate_shared_memory(out_tiles.dtype, [TALL * WIDE, _HALF, _BLOCK], out_tiles.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(arrived.index(first), count=1)
        mbarrier.init(free.index(first), count=TALL * WIDE)
    fence_async_shared()
    _, n, begin, turns = _place(gl.program_id(0), row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks)
    for first in gl.static_range(STAGES):
        there = first < turns * _TOGETHER
        mbarrier.expect(arrived.index(first), BYTES, pred=there)
        for i in gl.static_range(WIDE):
            place = [(n * WIDE + i) * _BLOCK, (begin + first) * _BLOCK]
            tma.async_copy_global_to_shared(w, place, arrived.index(first), w_ring.index(WIDE * first + i), pred=there)
    start_next(PDL)
    wait_for_previous(PDL)
    work = (row_tiles, output_tiles, blocks, whole, parts, splits, part_blocks)
    rings = (x_ring, w_ring, scale_ring, arrived, free)
    multiplying = (w_scales, out, out_tiles, staging, sums, counters)
    copying = (x, w, x_scales)
    if TALL * WIDE == 2:
        gl.warp_specialize([
            (_multiply_units, (0, multiplying, rings, work, rows, outputs, TALL, STAGES)),
            (_multiply_units, (1, multiplying, rings, work, rows, outputs, TALL, STAGES)),
            (_copy_blocks, (copying, rings, work, rows, TALL, STAGES)),
        ], [4, 1], [_OF_TWO, _COPYING])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_units, (0, multiplying, rings, work, rows, outputs, TALL, STAGES)),
            (_multiply_units, (1, multiplying, rings, work, rows, outputs, TALL, STAGES)),
            (_multiply_units, (2, multiplying, rings, work, rows, outputs, TALL, STAGES)),
            (_copy_blocks, (copying, rings, work, rows, TALL, STAGES)),
        ], [4, 4, 1], [_OF_THREE, _OF_THREE, _COPYING])  # fmt: skip


@functools.cache
def fits(rows: int, outputs: int, inputs: int, programs: int) -> bool:
    """Whether this kernel computes the product faster than others, from measurements on H200 GPUs
    (`python benchmarks/fp8_batch.py`)."""
    if rows < _FEWEST_ROWS:
        return False
    if rows <= 64:
        return outputs % (2 * BLOCK) == 0 and outputs >= programs * 2 * BLOCK
    # cuBLAS reads rows of scales of W that are not aligned to 16 bytes from wrong addresses, without an error.
    if inputs // BLOCK % 4:
        return True
    tiles = triton.cdiv(rows, 128) * (outputs // BLOCK)
    torchs = triton.cdiv(tiles, programs) * (inputs // BLOCK)
    return bool(_time(share(rows, outputs, inputs, programs), inputs, programs) <= torchs)


def _time(work: Share, inputs: int, programs: int) -> float:
    """Time in blocks of cuBLAS: of those that a program multiplies one after the other, and of adding up its parts."""
    whole, parts = (-(-units // programs) for units in (work.whole, work.parts))
    return _BLOCK_TIME[work.tall] * (whole * (inputs // BLOCK) + parts * (work.blocks + _PART_BLOCKS))


@functools.cache
def share(rows: int, outputs: int, inputs: int, programs: int) -> Share:
    """Share a product among programs in the way that takes the least time."""
    return min(shares(rows, outputs, inputs, programs), key=lambda work: _time(work, inputs, programs))


def shares(rows: int, outputs: int, inputs: int, programs: int) -> list[Share]:
    """Ways to share a product among programs: whole tiles, or whole waves of tiles and the rest in equal parts."""
    blocks = inputs // BLOCK
    found = []
    for tall in (2, 3) if rows > 64 else (1,):
        tiles = triton.cdiv(rows, 64 * tall) * (outputs // BLOCK // (2 if tall == 1 else 1))
        rest = tiles % programs
        found.append(Share(tall, tiles, 0, 1, blocks))
        for splits in range(2, _MOST_SPLITS + 1):
            # A multiple of four: only behind the last one of all there are zeros.
            of_part = _TOGETHER.value * triton.cdiv(blocks, _TOGETHER.value * splits)
            parts = triton.cdiv(blocks, of_part)
            if parts > 1 and 0 < rest * parts <= _MOST_WAVES * programs:
                found.append(Share(tall, tiles - rest, rest * parts, parts, of_part))
    return found


def _new_room(device: torch.device, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial sums, and counters."""
    sums = torch.empty((_MOST_WAVES * programs * _MOST_CELLS * 64 * BLOCK,), dtype=torch.float32, device=device)
    return sums, torch.zeros((_MOST_CELLS * programs,), dtype=torch.int32, device=device)


_room = functools.cache(_new_room)
"""The same for all products of a device, which use it one after the other."""


def fp8_batch(x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, work: Share | None = None) -> torch.Tensor:
    """x W^T of `x` [M, K] and `weight` [N, K] with `scales` [N / 128, K / 128] in float32: [M, N] in bfloat16.
    `work`: another share than that of `share`."""
    inputs, outputs = weight.shape[1], len(weight)
    device = weight.device
    programs = multiprocessors(device)
    work = work or share(x.rows, outputs, inputs, programs)
    tall = work.tall
    assert inputs % BLOCK == 0 and outputs % (BLOCK * (2 if tall == 1 else 1)) == 0
    assert len(scales) * BLOCK == outputs and (not x.per_row or inputs == BLOCK)
    # Kernels are also recorded with tensors that have no memory.
    sums, counters = (_new_room if isinstance(weight, FakeTensor) else _room)(device, programs)
    out = torch.empty((x.rows, outputs), dtype=torch.bfloat16, device=device)
    # Programs wait for one another, so all of them must run at once: one per multiprocessor.
    _fp8_batch[(programs if work.parts else min(programs, work.whole),)](
        tile_map(x.values, 64, BLOCK), tile_map(weight, BLOCK, BLOCK), row_map(x.scales, 64), scales, out,
        tile_map(out, 64, BLOCK), sums, counters, x.rows, inputs, outputs, *work[1:], TALL=tall,
        STAGES=_STAGES[tall], num_warps=4, maxnreg=_REGISTERS[tall], **dependent_launch(device),
    )  # fmt: skip
    return out


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, each of which runs one program."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
