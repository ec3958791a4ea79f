"""Decode attention of rows that share the beginning of their context (cascade attention, Juravsky et al.,
arXiv:2402.05099), over the paged pool, in two kernels.

`_shared` reads the shared pages once for a tile of many rows: their query heads of one KV head fill a tensor-core tile,
so it computes at the speed of prefill. The pages are divided among several programs (splits), each of which writes its
normalized partial output and the logarithm of its sum of weights. `_own` then reads each row's own pages and combines
the partial outputs: the attention to all positions is their mean, weighted by their sums. Sums and logarithms are to
base 2.

All values that change from step to step are read on the device, so a captured launch can be replayed.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_BLOCK = 32
# Among the best settings of benchmarks/cascade.py for all models.
_SHARED_LAUNCH = {"num_warps": 8, "num_stages": 5, "maxnreg": 128}
"""`maxnreg` lets two programs fit on a multiprocessor: one computes weights while the other multiplies."""
_OWN_LAUNCH = {"num_warps": 1, "num_stages": 3}
"""A single warp needs no barrier."""
_DOT_ROWS = 16
"""Least rows of a tensor-core product."""


@triton.jit
def _locations(page_row, position, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Pool rows [BLOCK] of the positions from `position` on, which is a multiple of BLOCK behind a page's begin.
    Positions at or behind `end` do not access another page than those before it."""
    if PAGE % BLOCK == 0:
        page = tl.load(page_row + position // PAGE).to(tl.int64)
        return page * PAGE + position % PAGE + tl.arange(0, BLOCK)
    positions = position + tl.arange(0, BLOCK)
    page = tl.load(page_row + positions // PAGE, positions < end, other=0).to(tl.int64)
    return page * PAGE + positions % PAGE


@triton.jit
def _add_block(score, value, best, total, out):
    """Combine (highest score, sum of weights, weighted values) so far with a block of tokens. While `best` of a row is
    empty, its `score` must have a token."""
    highest = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - highest[:, None])
    shrink = tl.exp2(best - highest)
    out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None])
    return highest, total * shrink + tl.sum(weight, 1), out


# Sizes change with the batch and the maximum length: compile one kernel for all.
@triton.jit(do_not_specialize=["rows", "pages_per_row"], do_not_specialize_on_alignment=["counts", "tiles"])
def _shared(
    q, keys, values, page_table, counts, tiles, parts, sums, rows, pages_per_row, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # In this order: when `_own` starts, the keys and values of its rows' newest tokens are stored.
    wait_for_previous(PDL)
    start_next(PDL)
    splits = tl.load(counts + 1)
    item = tl.program_id(0)
    if item >= tl.load(counts) * splits * KV_HEADS:
        return
    kv_head = item % KV_HEADS
    split = item // KV_HEADS % splits
    tile = tiles + item // KV_HEADS // splits * (1 + TILE_ROWS)
    pages = tl.load(tile)
    page_row = page_table + tl.load(tile + 1).to(tl.int64) * pages_per_row

    vector = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM)
    row = tl.load(tile + 1 + vector // GROUP, vector < TILE_ROWS * GROUP, other=-1).to(tl.int64)
    there = row >= 0
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + vector % GROUP
    query = tl.load(q + head[:, None] * HEAD_DIM + column[None, :], there[:, None], other=0.0)

    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, HEAD_DIM), tl.float32)
    begin, end = pages * split // splits * PAGE, pages * (split + 1) // splits * PAGE
    for position in range(begin, end, BLOCK):
        location = _locations(page_row, position, end, PAGE, BLOCK) * KV_HEADS + kv_head
        place = location[:, None] * HEAD_DIM + column[None, :]
        if PAGE % BLOCK == 0:
            key = tl.load(keys + place).to(query.dtype)
            value = tl.load(values + place).to(query.dtype)
            score = tl.dot(query, tl.trans(key)) * scale
        else:
            inside = position + tl.arange(0, BLOCK) < end
            key = tl.load(keys + place, inside[:, None], other=0.0).to(query.dtype)
            value = tl.load(values + place, inside[:, None], other=0.0).to(query.dtype)
            score = tl.where(inside[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        best, total, out = _add_block(score, value, best, total, out)

    # A split without pages has weight 0.
    head += split * rows * (KV_HEADS * GROUP)
    tl.store(sums + head, best + tl.log2(total), there)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + head[:, None] * HEAD_DIM + column[None, :], out.to(parts.dtype.element_ty), there[:, None])


@triton.jit(
    do_not_specialize=["rows", "pages_per_row"],
    do_not_specialize_on_alignment=["lengths", "prefix_pages", "counts"],
)
def _own(
    q, keys, values, page_table, lengths, prefix_pages, counts, parts, sums, result, rows, pages_per_row, scale,
    value_scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, VECTORS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # It reads everything but the partial outputs before it waits: `_shared`, the previous kernel, has waited for all
    # earlier writes before it let this one start.
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    page_row = page_table + row * pages_per_row
    length = tl.load(lengths + row)
    begin = tl.load(prefix_pages + row) * PAGE

    vector = tl.arange(0, VECTORS)
    column = tl.arange(0, HEAD_DIM)
    there = vector < GROUP
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + vector
    query = tl.load(q + head[:, None] * HEAD_DIM + column[None, :], there[:, None], other=0.0)

    best = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    out = tl.zeros((VECTORS, HEAD_DIM), tl.float32)
    # At least one iteration: a row's own token is never shared.
    for position in range(begin, length, BLOCK):
        location = _locations(page_row, position, length, PAGE, BLOCK) * KV_HEADS + kv_head
        place = location[:, None] * HEAD_DIM + column[None, :]
        # Values behind the last token may belong to an earlier owner and may not be finite: do not read them.
        inside = position + tl.arange(0, BLOCK) < length
        key = tl.load(keys + place, inside[:, None], other=0.0).to(query.dtype)
        value = tl.load(values + place, inside[:, None], other=0.0).to(query.dtype)
        score = tl.where(inside[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        best, total, out = _add_block(score, value, best, total, out)

    start_next(PDL)
    wait_for_previous(PDL)
    if begin > 0:
        splits = tl.load(counts + 1)
        for split in tl.static_range(SPLITS):
            written = there & (split < splits)
            where = head + split * rows * (KV_HEADS * GROUP)
            part_sum = tl.load(sums + where, written, other=float("-inf"))
            part = tl.load(parts + where[:, None] * HEAD_DIM + column[None, :], written[:, None], other=0.0)
            highest = tl.maximum(best, part_sum)
            shrink, weight = tl.exp2(best - highest), tl.exp2(part_sum - highest)
            total = total * shrink + weight
            out = out * shrink[:, None] + part.to(tl.float32) * weight[:, None]
            best = highest
    out = out / total[:, None] * value_scale
    tl.store(result + head[:, None] * HEAD_DIM + column[None, :], out.to(result.dtype.element_ty), there[:, None])


def cascade_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    prefix_pages: torch.Tensor,
    tiles: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    scales: KVScales,
    programs: int,
) -> None:
    """Attention of `q` [D, Hq, D'] to `out` [D, Hq, D'].

    `keys` and `values` [pages, page_size, Hkv, D'] of one layer with `scales`; `page_table` [D, pages_per_row] and
    `lengths` [D] of the rows; `counts`, `prefix_pages` and `tiles` as in `attention.cascade.CascadeTables`; all these
    int32. `parts` [splits, ≥ D, Hq, D'] and `sums` [splits, ≥ D, Hq], float32, are scratch memory that limits the
    splits. Scores are multiplied by `scale` and are exponents of 2. `programs`: programs of the first kernel, at least
    as many as run in parallel.
    """
    count, heads, head_dim = q.shape
    page_size, kv_heads = keys.shape[1:3]
    group, rows = heads // kv_heads, parts.shape[1]
    assert count <= rows and sums.shape == parts.shape[:3]
    assert all(x.is_contiguous() for x in (q, keys, values, page_table, tiles, parts, sums, out))
    tile_rows = tiles.shape[1] - 1
    early = dependent_launch(q.device)
    _shared[(max(programs, len(tiles) * kv_heads),)](
        q, keys, values, page_table, counts, tiles, parts, sums, rows, page_table.stride(0),
        scale * scales.key,
        KV_HEADS=kv_heads, GROUP=group, TILE_ROWS=tile_rows, HEAD_DIM=head_dim, PAGE=page_size, BLOCK=_BLOCK,
        TILE=triton.next_power_of_2(tile_rows * group),
        **_SHARED_LAUNCH, **early,
    )  # fmt: skip
    _own[(kv_heads, count)](
        q, keys, values, page_table, lengths, prefix_pages, counts, parts, sums, out, rows, page_table.stride(0),
        scale * scales.key, scales.value,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, BLOCK=_BLOCK,
        VECTORS=max(_DOT_ROWS, triton.next_power_of_2(group)), SPLITS=len(parts),
        **_OWN_LAUNCH, **early,
    )  # fmt: skip
