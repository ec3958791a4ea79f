# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Decode attention of very few rows over the paged KV pool, in two kernels: the context of each row is divided among
many programs, whose partial results are then combined (FlashDecoding; arXiv:2402.05099, section 3.3, has the formulas).

With few rows the time is that of a chain of dependent reads, not that of the bytes. So pages are read while the
previous kernels still run: only the newest token of a row belongs to this step, all others were stored before it began.
Sums and logarithms are to base 2.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

SPLITS = 32
BLOCK = 32
"""Tokens that a program reads at a time, all in one page."""

_VECTORS = 16
"""Least rows of a tensor-core product: query heads of one KV head, and padding."""


@triton.jit
def _block(pool, page_row, position, end, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Load [BLOCK, HEAD_DIM] of one KV head from `position` on; zeros at and behind `end`."""
    page = tl.load(page_row + position // PAGE, position < end, other=0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    place = ((page * PAGE + position % PAGE + token) * KV_HEADS + kv_head)[:, None] * HEAD_DIM
    return tl.load(pool + place + tl.arange(0, HEAD_DIM)[None, :], (position + token < end)[:, None], other=0.0)


@triton.jit
def _attend(query, key, value, inside, best, total, out, scale):
    """Update the softmax so far with `value` [tokens, HEAD_DIM] by the scores of `key`, for tokens that are
    `inside`."""
    score = tl.where(inside[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    highest = tl.maximum(best, tl.max(score, 1))
    # Without any token there is no highest score, but the differences below must be finite.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(best - base)
    out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None])
    return highest, total * shrink + tl.sum(weight, 1), out


@triton.jit(do_not_specialize=["pages_per_row"], do_not_specialize_on_alignment=["slots", "lengths"])
def _part(
    q, keys, values, page_table, slots, lengths, parts, sums, pages_per_row, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    VECTORS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # Lengths and page table are from the beginning of the step, which launches in between have waited for.
    newest = tl.load(lengths + row) - 1
    page_row = page_table + tl.load(slots + row).to(tl.int64) * pages_per_row
    share = tl.cdiv(newest, BLOCK * SPLITS) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, newest)
    token = tl.arange(0, BLOCK)
    key = _block(keys, page_row, begin, end, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
    value = _block(values, page_row, begin, end, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
    start_next(PDL)
    wait_for_previous(PDL)

    vector = tl.arange(0, VECTORS)
    column = tl.arange(0, HEAD_DIM)
    there = vector < GROUP
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + vector
    query = tl.load(q + head[:, None] * HEAD_DIM + column[None, :], there[:, None], other=0.0)
    best = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    out = tl.zeros((VECTORS, HEAD_DIM), tl.float32)
    best, total, out = _attend(query, key, value, begin + token < end, best, total, out, scale)
    for position in range(begin + BLOCK, end, BLOCK):
        key = _block(keys, page_row, position, end, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
        value = _block(values, page_row, position, end, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
        best, total, out = _attend(query, key, value, position + token < end, best, total, out, scale)
    if split == SPLITS - 1:
        page = tl.load(page_row + newest // PAGE).to(tl.int64)
        place = ((page * PAGE + newest % PAGE) * KV_HEADS + kv_head) * HEAD_DIM + column
        new_key = tl.load(keys + place).to(tl.float32)
        score = tl.sum(query.to(tl.float32) * new_key[None, :], 1) * scale
        highest = tl.maximum(best, score)
        weight, shrink = tl.exp2(score - highest), tl.exp2(best - highest)
        total = total * shrink + weight
        out = out * shrink[:, None] + weight[:, None] * tl.load(values + place).to(tl.float32)[None, :]
        best = highest
    # A split without tokens has weight 0.
    place = head * SPLITS + split
    tl.store(sums + place, best + tl.log2(total), there)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], out, there[:, None])


@triton.jit
def _whole(parts, sums, result, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0).to(tl.int64)
    place = head * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, HEAD_DIM)
    part_sum = tl.load(sums + place)
    part = tl.load(parts + place[:, None] * HEAD_DIM + column[None, :])
    weight = tl.exp2(part_sum - tl.max(part_sum, 0))
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(result + head * HEAD_DIM + column, out.to(result.dtype.element_ty))


def split_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attention of `q` [R, Hq, D], contiguous, to the `lengths` [R] tokens of `slots` [R], into `out` like it.

    `keys` and `values` [pages, page_size, Hkv, D] of one layer; all but each row's newest token were stored before the
    step began. `parts` [R, Hq, SPLITS, D] and `sums` [R, Hq, SPLITS] float32 are scratch memory. `scale` multiplies
    the scores, in units of log 2.
    """
    rows, heads, head_dim = q.shape
    assert q.is_contiguous() and out.is_contiguous()
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    assert group <= _VECTORS and page_size % BLOCK == 0
    early = dependent_launch(q.device)
    _part[(kv_heads, SPLITS, rows)](
        q, keys, values, page_table, slots, lengths, parts, sums, page_table.stride(0), scale, KV_HEADS=kv_heads,
        GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, BLOCK=BLOCK, VECTORS=_VECTORS, SPLITS=SPLITS, num_warps=4,
        num_stages=3, **early,
    )  # fmt: skip
    _whole[(rows * heads,)](parts, sums, out, HEAD_DIM=head_dim, SPLITS=SPLITS, num_warps=4, **early)
