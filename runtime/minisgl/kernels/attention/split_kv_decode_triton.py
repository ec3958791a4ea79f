"""Decode attention of very few rows over the paged KV pool, in two kernels: the context of each row is divided among
many programs, whose partial results are then combined (FlashDecoding; arXiv:2402.05099, section 3.3, has the formulas).

With few rows the time is that of a chain of dependent reads, not that of the bytes. So pages are read while the
previous kernels still run: only the newest token of a row belongs to this step, all others were stored before it began.
In a step without prompts the first kernel also does the work of `rotate_and_store`: it rotates its queries itself, and
takes the newest token's key and value from the projection, where it would wait longer for the pool.
Sums and logarithms are to base 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.rotary_triton import as_stored, turned
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.sinks_triton import share_beside_sink
from minisgl.kernels.attention.stored_kv import UNSCALED, KVScales
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

SPLITS = 32
BLOCK = 32
"""Tokens that a program reads at a time, all in one page."""

_VECTORS = 16
"""Least rows of a tensor-core product: query heads of one KV head, and padding."""


class NewTokens(NamedTuple):
    """The newest token of each row before its rotation; `k` and `v` [R, Hkv, D], whose last two dimensions are
    contiguous."""

    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation


@triton.jit
def _inside(position, first, end, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the tokens [BLOCK] from `position` on are behind `first` and before `end`."""
    token = position + tl.arange(0, BLOCK)
    return (token < end) & (token >= first) if WINDOW else token < end


@triton.jit
def _block(pool, page_row, position, end, inside, kv_head, column, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
           PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Load [BLOCK, columns] of one KV head from `position` on; zeros for tokens that are not `inside`."""
    page = tl.load(page_row + position // PAGE, position < end, other=0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    place = ((page * PAGE + position % PAGE + token) * KV_HEADS + kv_head)[:, None] * HEAD_DIM
    return tl.load(pool + place + column[None, :], inside[:, None], other=0.0)


@triton.jit
def _attend(query, query_behind, key, key_behind, value, inside, best, total, out, scale):
    """Update the softmax so far with `value` [tokens, HEAD_DIM] by the scores of both halves of the keys, for tokens
    that are `inside`."""
    dtype: tl.constexpr = query.dtype
    # Not where they are loaded: the first block would be waited for too early.
    key, key_behind, value = key.to(dtype), key_behind.to(dtype), value.to(dtype)
    score = tl.dot(query_behind, tl.trans(key_behind), tl.dot(query, tl.trans(key))) * scale
    score = tl.where(inside[None, :], score, float("-inf"))
    highest = tl.maximum(best, tl.max(score, 1))
    # Without any token there is no highest score, but the differences below must be finite.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(best - base)
    out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None])
    return highest, total * shrink + tl.sum(weight, 1), out


@triton.jit(do_not_specialize=["pages_per_row"], do_not_specialize_on_alignment=["slots", "lengths"])
def _part(
    q, k, v, cos_sin, q_gain, k_gain, keys, values, page_table, slots, lengths, parts, sums, q_stride, k_stride,
    v_stride, pages_per_row, scale, key_inverse, value_inverse, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    VECTORS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROUND_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of the queries of one KV head and row to one part of the context. Without ROTATE the queries are
    rotated, and the newest token is in the pool."""
    HEAD_DIM: tl.constexpr = 2 * HALF
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # Lengths and page table are from the beginning of the step, which launches in between have waited for.
    newest = tl.load(lengths + row) - 1
    page_row = page_table + tl.load(slots + row).to(tl.int64) * pages_per_row
    first = tl.maximum(newest + 1 - WINDOW, 0) if WINDOW else 0
    start = first // BLOCK * BLOCK
    share = tl.cdiv(newest - start, BLOCK * SPLITS) * BLOCK
    begin = start + split * share
    end = tl.minimum(begin + share, newest)
    vector = tl.arange(0, VECTORS)
    column = tl.arange(0, HEAD_DIM)
    half = tl.arange(0, HALF)
    pair = half[None, :]
    inside = _inside(begin, first, end, BLOCK, WINDOW)
    key = _block(keys, page_row, begin, end, inside, kv_head, half, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
    key_behind = _block(keys + HALF, page_row, begin, end, inside, kv_head, half, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
    value = _block(values, page_row, begin, end, inside, kv_head, column, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
    last = split == SPLITS - 1
    page = tl.load(page_row + newest // PAGE).to(tl.int64)
    place = ((page * PAGE + newest % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
    gain, gain_behind, key_gain, key_gain_behind = 1.0, 1.0, 1.0, 1.0
    if NORM:
        gain, gain_behind = tl.load(q_gain + pair).to(tl.float32), tl.load(q_gain + HALF + pair).to(tl.float32)
        key_gain, key_gain_behind = tl.load(k_gain + pair).to(tl.float32), tl.load(k_gain + HALF + pair).to(tl.float32)
        if UNIT_OFFSET:
            gain, gain_behind = gain + 1.0, gain_behind + 1.0
            key_gain, key_gain_behind = key_gain + 1.0, key_gain_behind + 1.0
    start_next(PDL)
    wait_for_previous(PDL)

    there = vector < GROUP
    query_place = row * q_stride + (kv_head * GROUP + vector)[:, None] * Q_HEAD_STRIDE + pair
    if ROTATE:
        cos = tl.load(cos_sin + row * HEAD_DIM + pair)
        sin = tl.load(cos_sin + row * HEAD_DIM + HALF + pair)
        new_key, new_key_behind = turned(
            k + row * k_stride + kv_head * HEAD_DIM, pair, last, cos, sin, key_gain, key_gain_behind, eps, HALF, NORM,
            ROUND_LAST,
        )  # fmt: skip
        new_value = tl.load(v + row * v_stride + kv_head * HEAD_DIM + column, last, other=0.0)
        query, query_behind = turned(
            q, query_place, there[:, None], cos, sin, gain, gain_behind, eps, HALF, NORM, ROUND_LAST
        )
    else:
        new_key = tl.load(keys + place + pair, last, other=0.0)
        new_key_behind = tl.load(keys + place + HALF + pair, last, other=0.0)
        new_value = tl.load(values + place + column, last, other=0.0)
        query = tl.load(q + query_place, there[:, None], other=0.0)
        query_behind = tl.load(q + query_place + HALF, there[:, None], other=0.0)
    best = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    out = tl.zeros((VECTORS, HEAD_DIM), tl.float32)
    best, total, out = _attend(query, query_behind, key, key_behind, value, inside, best, total, out, scale)
    for position in range(begin + BLOCK, end, BLOCK):
        # Only the first block reaches over the begin of the window.
        inside = _inside(position, first, end, BLOCK, False)
        key = _block(keys, page_row, position, end, inside, kv_head, half, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
        key_behind = _block(
            keys + HALF, page_row, position, end, inside, kv_head, half, KV_HEADS, HEAD_DIM, PAGE, BLOCK
        )
        value = _block(values, page_row, position, end, inside, kv_head, column, KV_HEADS, HEAD_DIM, PAGE, BLOCK)
        best, total, out = _attend(query, query_behind, key, key_behind, value, inside, best, total, out, scale)
    if last:
        if ROTATE:
            stored_key = as_stored(new_key, key_inverse, keys)
            stored_key_behind = as_stored(new_key_behind, key_inverse, keys)
            stored_value = as_stored(new_value, value_inverse, values)
            tl.store(keys + place + pair, stored_key)
            tl.store(keys + place + HALF + pair, stored_key_behind)
            tl.store(values + place + column, stored_value)
            # Later steps read what is stored.
            new_key, new_key_behind = stored_key.to(query.dtype), stored_key_behind.to(query.dtype)
            new_value = stored_value.to(query.dtype)
        products = query.to(tl.float32) * new_key.to(tl.float32)
        products += query_behind.to(tl.float32) * new_key_behind.to(tl.float32)
        score = tl.sum(products, 1) * scale
        highest = tl.maximum(best, score)
        weight, shrink = tl.exp2(score - highest), tl.exp2(best - highest)
        total = total * shrink + weight
        out = out * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        best = highest
    # A split without tokens has weight 0.
    part = (row * (KV_HEADS * GROUP) + kv_head * GROUP + vector) * SPLITS + split
    tl.store(sums + part, best + tl.log2(total), there)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + part[:, None] * HEAD_DIM + column[None, :], out, there[:, None])


@triton.jit
def _whole(
    parts, sums, sinks, result, value_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0).to(tl.int64)
    place = head * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, HEAD_DIM)
    part_sum = tl.load(sums + place)
    part = tl.load(parts + place[:, None] * HEAD_DIM + column[None, :])
    best = tl.max(part_sum, 0)
    weight = tl.exp2(part_sum - best)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / total * value_scale
    if SINKS:
        out *= share_beside_sink(best + tl.log2(total), tl.load(sinks + head % HEADS))
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
    scales: KVScales = UNSCALED,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    new: NewTokens | None = None,
) -> None:
    """Attention of `q` [R, Hq, D] to the `lengths` [R] tokens of `slots` [R], or to the last `window` of them, into
    `out` [R, Hq, D], contiguous. Something may stand between the queries of two heads.

    `keys` and `values` [pages, page_size, Hkv, D] of one layer with `scales`; all but each row's newest token were
    stored before the step began. `new`: `q` is not rotated yet, and the newest tokens are not in the pool; the kernel
    stores them. `parts` [R, Hq, SPLITS, D] and `sums` [R, Hq, SPLITS] float32 are scratch memory. `scale` multiplies
    the scores, in units of log 2. `sinks` [Hq]: see `sinks_triton`.
    """
    rows, heads, head_dim = q.shape
    assert q.stride(2) == 1 and out.is_contiguous()
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    assert group <= _VECTORS and page_size % BLOCK == 0
    k, v, cos_sin, q_gain, k_gain, eps = q, q, q, q, q, 0.0
    norm, unit_offset, round_last = False, False, False
    if new is not None:
        k, v, rotation = new
        assert all(part.stride(2) == 1 and part.stride(1) == head_dim for part in (k, v))
        cos_sin, eps = rotation.cos_sin, rotation.eps
        if rotation.q_gain is not None and rotation.k_gain is not None:
            q_gain, k_gain, norm = rotation.q_gain, rotation.k_gain, True
            unit_offset, round_last = rotation.unit_offset, rotation.round_last
    early = dependent_launch(q.device)
    # Heads of 512 would not fit into the registers of fewer warps, nor three of their blocks into shared memory.
    is_wide = head_dim > 256
    _part[(kv_heads, SPLITS, rows)](
        q, k, v, cos_sin, q_gain, k_gain, keys, values, page_table, slots, lengths, parts, sums, q.stride(0),
        k.stride(0), v.stride(0), page_table.stride(0), scale * scales.key,
        1.0 / scales.key, 1.0 / scales.value, eps, KV_HEADS=kv_heads, GROUP=group,
        HALF=head_dim // 2, PAGE=page_size, BLOCK=BLOCK, VECTORS=_VECTORS, SPLITS=SPLITS, WINDOW=window or 0,
        Q_HEAD_STRIDE=q.stride(1), ROTATE=new is not None, NORM=norm, UNIT_OFFSET=unit_offset, ROUND_LAST=round_last,
        num_warps=8 if is_wide else 4, num_stages=2 if is_wide else 3, **early,
    )  # fmt: skip
    _whole[(rows * heads,)](
        parts, sums, sums if sinks is None else sinks, out, scales.value, HEADS=heads, HEAD_DIM=head_dim,
        SPLITS=SPLITS, SINKS=sinks is not None, num_warps=4, **early,
    )  # fmt: skip
