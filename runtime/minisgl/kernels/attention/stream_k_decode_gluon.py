"""Decode attention of many rows of different lengths over the paged KV pool, for Hopper. It reads all keys and values
once, so it is fast if the whole GPU reads until the end.

The token blocks of all rows, concatenated, are divided into spans of equal size (work-centric decomposition, Stream-K,
arXiv:2301.03598), independent of rows. A program reads one span for one KV head; the programs of a span's KV heads are
neighbours, because together they read contiguous memory. A row that spans several programs leaves partial results in
scratch memory; the last program to arrive adds them up, always in the same order. A program begins with the rows that
it shares, so that few partial results remain to be added at the end.

A program is one warp: it needs no barrier, and several programs per multiprocessor fill its shared memory with blocks
in flight. It is written in Gluon, Triton's lower level, for copies that begin ahead of `griddepcontrol.wait` and stay
in flight across rows. All values that change from step to step are read on the device, so a captured launch can be
replayed. Sums and logarithms are to base 2.

Keys and values are the first factors of both products, [tokens, columns] × [columns, heads] and [columns, tokens] ×
[tokens, heads]: a product of tensor cores has at least 16 rows but only 8 columns, and few models have more than 8
query heads per KV head.

A pool in FP8 is read as pairs of neighbouring numbers, which are 16 bits wide like the elements of other pools: only
those can be transposed on their way from shared memory. Both halves of the pairs are converted in registers, to
float16, which holds all FP8 numbers, and multiplied separately: numbers at even and at odd columns of a head.
"""

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minisgl.kernels.attention.stored_kv import FP8, KVScales
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.wire.messages import MOST_DRAFTS

MAX_GROUP: Final = 16
"""Query heads per KV head. Up to 8 fill the columns of one tensor-core product, more those of two."""
_CHUNK: Final = 128
_QUERY_SHRINK = gl.constexpr(16)
"""Queries are divided by it beside a pool in FP8, which keeps large ones inside float16."""
_LOG2_E = gl.constexpr(math.log2(math.e))


class Settings(NamedTuple):
    block: int
    """Tokens per copy, all in one page."""
    stages: int
    """Blocks that a program can keep in shared memory."""
    programs: int
    """Programs per multiprocessor."""


class Spans(NamedTuple):
    """Blocks of a batch, all int32. `cut_spans` writes them once per step for all layers."""

    ends: torch.Tensor
    """[rows]: blocks of this row and all rows before it."""
    owners: torch.Tensor
    """[blocks]: row of each block."""
    places: torch.Tensor
    """[blocks]: pool location of a block's first token; as −1 − location if the block holds the row's newest token."""


@triton.jit
def _first_block(length, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Number of the first block that a row reads."""
    return tl.maximum(length - WINDOW, 0) // BLOCK if WINDOW else 0


@triton.jit
def _blocks(length, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    # A row without a token has a block too: some program must write its result.
    return tl.maximum(tl.cdiv(length, BLOCK) - _first_block(length, BLOCK, WINDOW), 1)


@triton.jit(do_not_specialize=["pages_per_row"], do_not_specialize_on_alignment=["slots", "lengths"])
def _cut(
    page_table, slots, lengths, ends, owners, places, pages_per_row,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, row, CHUNK):
        other = first + lane
        before += tl.where(other < row, _blocks(tl.load(lengths + other, other < row, other=0), BLOCK, WINDOW), 0)
    begin = tl.sum(before, 0)
    length = tl.load(lengths + row)
    count = _blocks(length, BLOCK, WINDOW)
    first_block = _first_block(length, BLOCK, WINDOW)
    tl.store(ends + row, begin + count)
    slot = tl.load(slots + row)
    # A row with drafts is several rows of one slot, each of which reads what those before it store in the same step.
    is_same, before_in_step = row > 0, row * 0
    for number in tl.static_range(1, DRAFTS + 1):
        is_same &= (row >= number) & (tl.load(slots + tl.maximum(row - number, 0)) == slot)
        before_in_step += is_same.to(tl.int32)
    first_new = tl.maximum(length - 1 - before_in_step, 0) // BLOCK - first_block
    page_row = page_table + slot.to(tl.int64) * pages_per_row
    for first in range(0, count, CHUNK):
        block = first + lane
        there = block < count
        position = (first_block + block) * BLOCK
        place = tl.load(page_row + position // PAGE, there, other=0) * PAGE + position % PAGE
        tl.store(owners + begin + block, tl.zeros((CHUNK,), tl.int32) + row, there)
        tl.store(places + begin + block, tl.where(block >= first_new, -1 - place, place), there)


@gluon.jit
def _copy(keys, values, place, kv_head, key_ring, value_ring, arrived, slot, there):
    """Start to copy the keys and values of a block to stage `slot`, if `there`."""
    BYTES: gl.constexpr = keys.block_type.nbytes + values.block_type.nbytes
    column = kv_head * keys.block_type.shape[1]
    barrier = arrived.index(slot)
    mbarrier.expect(barrier, BYTES, pred=there)
    tma.async_copy_global_to_shared(keys, [place, column], barrier, key_ring.index(slot), pred=there)
    tma.async_copy_global_to_shared(values, [place, column], barrier, value_ring.index(slot), pred=there)


@gluon.jit
def _halves(pairs):
    """Numbers at even and at odd places, in float16, of `pairs` of FP8 numbers."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _add(best, total, sum_of):
    """Combine (highest score, sum of weights) so far with a partial result. Also returns the factors [1, vectors] of
    the weighted values so far and of the partial result's."""
    highest = gl.maximum(best, sum_of)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    shrink, weight = gl.exp2(best - base), gl.exp2(sum_of - base)
    return highest, total * shrink + weight, shrink[None, :], weight[None, :]


@gluon.jit
def _share_beside_sink(best, total, sink):
    """Share of a row's tokens in the softmax beside a sink. All logarithms are to base 2."""
    return 1.0 / (1.0 + gl.exp2(sink - best - gl.log2(total)))


@gluon.jit
def _store(pointers, out, odd, own, PAIRS: gl.constexpr):
    """Store results, with PAIRS those of even and of `odd` columns."""
    gl.store(pointers, out.to(pointers.dtype.element_ty), own)
    if PAIRS:
        gl.store(pointers + 1, odd.to(pointers.dtype.element_ty), own)


@gluon.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lengths"])
def _attend(
    keys, values, q, lengths, ends, owners, places, parts, sums, arrivals, sinks, result, rows, scale, value_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    BLOCK: gl.constexpr = keys.block_type.shape[0]
    COLUMNS: gl.constexpr = keys.block_type.shape[1]
    PAIRS: gl.constexpr = keys.dtype == gl.int16
    STEP: gl.constexpr = 2 if PAIRS else 1
    HEAD_DIM: gl.constexpr = COLUMNS * STEP
    VECTORS: gl.constexpr = 8 if GROUP <= 8 else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    first_factor: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    second_factor: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    of_columns: gl.constexpr = gl.SliceLayout(0, mma)

    kv_head = gl.program_id(0)
    span = gl.program_id(1)
    # Before it waits it reads only data of the step and the pool from before the step began.
    blocks = gl.load(ends + rows - 1)
    spans = gl.minimum(gl.num_programs(1), blocks)
    begin = gl.minimum(blocks * span // spans, blocks)
    end = gl.minimum(blocks * (span + 1) // spans, blocks)
    count = end - begin
    # Start with the last row if another program continues it.
    final_row = gl.load(owners + gl.maximum(end - 1, 0))
    final_begin = gl.load(ends + final_row - 1, final_row > 0, other=0)
    cut = gl.load(ends + final_row) > end
    origin = gl.where(cut, gl.maximum(final_begin, begin), begin)

    key_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK, COLUMNS], keys.layout)
    value_ring = gl.allocate_shared_memory(values.dtype, [STAGES, BLOCK, COLUMNS], values.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        block = origin + stage
        block = gl.where(block >= end, block - count, block)
        there = stage < count
        place = gl.load(places + block, there, other=-1)
        _copy(keys, values, place, kv_head, key_ring, value_ring, arrived, stage, place >= 0)
    start_next(PDL)
    wait_for_previous(PDL)
    for stage in gl.static_range(STAGES):
        block = origin + stage
        block = gl.where(block >= end, block - count, block)
        there = stage < count
        place = gl.load(places + block, there, other=0)
        _copy(keys, values, -1 - place, kv_head, key_ring, value_ring, arrived, stage, place < 0)

    vector = gl.arange(0, VECTORS, layout=of_columns)
    column = gl.arange(0, COLUMNS, layout=of_rows) * STEP
    token = gl.arange(0, BLOCK, layout=of_rows)
    value_token = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, first_factor))
    query_vector = gl.arange(0, VECTORS, layout=gl.SliceLayout(0, second_factor))
    query_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, second_factor))
    own = (vector < GROUP)[None, :]
    sink = 0.0
    if SINKS:
        sink = gl.load(sinks + kv_head * GROUP + vector, vector < GROUP, other=0.0).to(gl.float32) * _LOG2_E
    done = 0
    while done < count:
        block = origin + done
        block = gl.where(block >= end, block - count, block)
        row = gl.load(owners + block)
        row_begin = gl.load(ends + row - 1, row > 0, other=0)
        row_end = gl.load(ends + row)
        length = gl.load(lengths + row)
        # Tokens of the row from its first block on, and those of them that are before its window.
        past = 0
        if WINDOW:
            past = gl.maximum(length - WINDOW, 0)
            length = length - past // BLOCK * BLOCK
            past = past % BLOCK
        head = (row * KV_HEADS + kv_head) * GROUP
        query_place = q + (head + query_vector)[None, :] * HEAD_DIM + query_column[:, None] * STEP
        query = gl.load(query_place, (query_vector < GROUP)[None, :], other=0.0)
        odd_query = query
        if PAIRS:
            odd_query = gl.load(query_place + 1, (query_vector < GROUP)[None, :], other=0.0)
            query = (query.to(gl.float32) / _QUERY_SHRINK).to(gl.float16)
            odd_query = (odd_query.to(gl.float32) / _QUERY_SHRINK).to(gl.float16)
        best = gl.full([VECTORS], float("-inf"), gl.float32, layout=of_columns)
        total = gl.zeros([VECTORS], gl.float32, layout=of_columns)
        out = gl.zeros([COLUMNS, VECTORS], gl.float32, layout=mma)
        odd = out
        for at in range(block, gl.minimum(row_end, end)):
            slot = done % STAGES
            more = done + STAGES < count
            ahead = origin + done + STAGES
            ahead = gl.where(ahead >= end, ahead - count, ahead)
            place = gl.load(places + ahead, more, other=0)
            mbarrier.wait(arrived.index(slot), done // STAGES & 1)
            key = key_ring.index(slot).load(first_factor)
            score = gl.zeros([BLOCK, VECTORS], gl.float32, layout=mma)
            if PAIRS:
                key, odd_key = _halves(key)
                score = mma_v2(odd_key, odd_query, score)
            score = mma_v2(key, query, score) * scale
            left = length - (at - row_begin) * BLOCK
            score = gl.where((token < left)[:, None], score, float("-inf"))
            if WINDOW:
                score = gl.where((token >= past - (at - row_begin) * BLOCK)[:, None], score, float("-inf"))
            highest = gl.maximum(best, gl.max(score, 0))
            base = gl.where(highest == float("-inf"), 0.0, highest)
            weight = gl.exp2(score - base[None, :])
            shrink = gl.exp2(best - base)
            total = total * shrink + gl.sum(weight, 0)
            best = highest
            value = value_ring.index(slot).permute((1, 0)).load(first_factor)
            if left < BLOCK:
                # Values of an earlier owner follow the last token, and a weight of 0 does not remove a NaN. The
                # barrier makes this a branch; otherwise the compiler selects between all values in every block.
                gl.thread_barrier()
                value = gl.where((value_token < left)[None, :], value, 0)
            if PAIRS:
                value, odd_value = _halves(value)
                weight = gl.convert_layout(weight.to(gl.float16), second_factor)
                odd = mma_v2(odd_value, weight, odd * shrink[None, :])
            else:
                weight = gl.convert_layout(weight.to(value.dtype), second_factor)
            out = mma_v2(value, weight, out * shrink[None, :])
            # All threads must have read the stage before it is filled again.
            gl.thread_barrier()
            place = gl.where(place < 0, -1 - place, place)
            _copy(keys, values, place, kv_head, key_ring, value_ring, arrived, slot, more)
            done += 1

        first_span = ((row_begin + 1) * spans - 1) // blocks
        last_span = (row_end * spans - 1) // blocks
        normal = (value_scale / gl.where(total > 0, total, 1.0))[None, :]
        out, odd = out * normal, odd * normal
        if first_span < last_span:
            # Partial results of the first and the last row of a span.
            part = ((2 * span + (first_span == span).to(gl.int32)) * KV_HEADS + kv_head) * GROUP
            _store(parts + (part + vector)[None, :] * HEAD_DIM + column[:, None], out, odd, own, PAIRS)
            gl.store(sums + part + vector, best + gl.log2(total), vector < GROUP)
            gl.thread_barrier()
            arrival = gl.atomic_add(arrivals + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
            if arrival == last_span - first_span:
                best = gl.full([VECTORS], float("-inf"), gl.float32, layout=of_columns)
                total = gl.zeros([VECTORS], gl.float32, layout=of_columns)
                out = gl.zeros([COLUMNS, VECTORS], gl.float32, layout=mma)
                odd = out
                for other in range(first_span, last_span + 1):
                    part = ((2 * other + (first_span == other).to(gl.int32)) * KV_HEADS + kv_head) * GROUP
                    # Bypass the L1 cache, which does not see writes of other multiprocessors.
                    sum_of = gl.load(sums + part + vector, vector < GROUP, other=0.0, cache_modifier=".cg")
                    part_place = parts + (part + vector)[None, :] * HEAD_DIM + column[:, None]
                    part_of = gl.load(part_place, own, other=0.0, cache_modifier=".cg")
                    best, total, kept, added = _add(best, total, sum_of)
                    out = out * kept + part_of * added
                    if PAIRS:
                        part_of = gl.load(part_place + 1, own, other=0.0, cache_modifier=".cg")
                        odd = odd * kept + part_of * added
                normal = 1.0 / gl.where(total > 0, total, 1.0)
                if SINKS:
                    normal = normal * _share_beside_sink(best, total, sink)
                normal = normal[None, :]
                place_of = result + (head + vector)[None, :] * HEAD_DIM + column[:, None]
                _store(place_of, out * normal, odd * normal, own, PAIRS)
                gl.store(arrivals + row * KV_HEADS + kv_head, 0)
        else:
            if SINKS:
                share = _share_beside_sink(best, total, sink)[None, :]
                out, odd = out * share, odd * share
            _store(result + (head + vector)[None, :] * HEAD_DIM + column[:, None], out, odd, own, PAIRS)


def cut_spans(
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    spans: Spans,
    *,
    page_size: int,
    block: int,
    window: int | None = None,
) -> None:
    """Write the `spans` of rows of `lengths` [R], whose pages `page_table` [slots, pages_per_row] holds at `slots` [R];
    all int32. Rows of one slot that follow each other have one more token each, all of them stored in this step. With a
    `window` they hold only the blocks of each row's last tokens. `spans` can hold the blocks of all
    tokens of R full rows."""
    rows = len(slots)
    assert page_size % block == 0 and rows <= len(spans.ends)
    _cut[(rows,)](
        page_table, slots, lengths, *spans, page_table.stride(0), PAGE=page_size, BLOCK=block, WINDOW=window or 0,
        CHUNK=_CHUNK, DRAFTS=MOST_DRAFTS, num_warps=4,
    )  # fmt: skip


def balanced_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    spans: Spans,
    parts: torch.Tensor,
    sums: torch.Tensor,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    scales: KVScales,
    settings: Settings,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of `q` [R, Hq, D], contiguous, to the `lengths` [R] tokens of each row, or to the last `window` of
    them, into `out` like it.

    `keys` and `values` [pages, page_size, Hkv, D] of one layer with `scales`; all but each row's newest token were
    stored before the step began. `spans` is the result of `cut_spans` for the block of `settings` and the `window`.
    `parts` [2 × S, Hq, D] and `sums` [2 × S, Hq], float32, are scratch memory, S the number of spans; `arrivals`
    [≥ R, Hkv] int32 must be zeros and are reset to zeros. `scale` multiplies the scores, in units of log 2.
    `sinks` [Hq]: see `sinks_triton`.
    """
    rows, heads, _ = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    assert q.is_contiguous() and out.is_contiguous() and group <= MAX_GROUP and rows <= len(arrivals)
    scale *= scales.key
    if keys.dtype == FP8:
        scale *= _QUERY_SHRINK.value
    _attend[(kv_heads, len(parts) // 2)](
        _tiles(keys, settings.block), _tiles(values, settings.block), q, lengths, *spans, parts, sums, arrivals,
        sums if sinks is None else sinks, out, rows, scale, scales.value, KV_HEADS=kv_heads, GROUP=group,
        STAGES=settings.stages, WINDOW=window or 0, SINKS=sinks is not None, num_warps=1, **dependent_launch(q.device),
    )  # fmt: skip


def _tiles(pool: torch.Tensor, block: int) -> TensorDescriptor:
    """Tensor map over blocks of tokens of one KV head; of pairs if the pool is FP8."""
    if pool.dtype == FP8:
        pool = pool.view(torch.int16)
    columns = pool.shape[3]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(pool.flatten(0, 1).flatten(1), [block, columns], layout)
