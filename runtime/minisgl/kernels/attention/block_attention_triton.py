"""`block_attention` on CUDA, in one launch: a program takes some queries of one KV head and block, and reads the pages
of its context. Lengths are on the device, so that nothing waits for it. Logarithms are to base 2."""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.block_contexts import Contexts

_QUERIES: Final = 32
"""Query vectors of a program: those of a few tokens, with all heads that share a KV head."""
_KEYS: Final = 64
"""Most keys that a program reads at a time, all in one page."""


@triton.jit
def _attend(query, key, value, inside, best, total, out, scale):
    """Update the softmax so far with the keys [keys, D] that are `inside`."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(inside[None, :], score, float("-inf"))
    highest = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - highest[:, None])
    shrink = tl.exp2(best - highest)
    out = out * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return highest, total * shrink + tl.sum(weight, 1), out


# Slices of a step's inputs begin at any address: one compiled kernel for all.
@triton.jit(do_not_specialize=["pages_per_row"], do_not_specialize_on_alignment=["slots", "lengths", "page_table"])
def _block_attention(
    q, k, v, keys, values, page_table, slots, lengths, out, v_stride, pages_per_row, scale,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + slot)
    column = tl.arange(0, COLUMNS)[None, :]
    wide = column < HEAD_DIM
    vector = part * QUERIES + tl.arange(0, QUERIES)
    there = (vector < TOKENS * GROUP)[:, None] & wide
    token = row * TOKENS + vector // GROUP
    place = ((token * KV_HEADS + kv_head) * GROUP + vector % GROUP)[:, None] * HEAD_DIM + column
    query = tl.load(q + place, there, other=0.0)
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attended = tl.zeros((QUERIES, COLUMNS), tl.float32)
    # The block itself first: with its keys the highest score is finite.
    own = tl.arange(0, OWN)
    is_own = own < TOKENS
    of_token = row * TOKENS + own
    own_mask = is_own[:, None] & wide
    own_key = tl.load(k + (of_token * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column, own_mask, other=0.0)
    own_value = tl.load(v + (of_token * v_stride + kv_head * HEAD_DIM)[:, None] + column, own_mask, other=0.0)
    best, total, attended = _attend(query, own_key, own_value, is_own, best, total, attended, scale)
    pages = page_table + slot * pages_per_row
    offset = tl.arange(0, KEYS)
    for position in range(0, length, KEYS):
        page = tl.load(pages + position // PAGE).to(tl.int64)
        # Keys of a smaller page are padded.
        within = position % PAGE + offset
        inside = position + offset < length
        mask = inside[:, None] & wide
        at = ((page * PAGE + within) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column
        key = tl.load(keys + at, mask, other=0.0)
        value = tl.load(values + at, mask, other=0.0)
        best, total, attended = _attend(query, key, value, inside, best, total, attended, scale)
    tl.store(out + place, (attended / total[:, None]).to(out.dtype.element_ty), there)


def block_attention_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: Contexts,
    scale: float,
) -> torch.Tensor:
    """See `block_attention`. Pages have a multiple of 16 tokens that is a power of two, or of `_KEYS`."""
    q, k = q.contiguous(), k.contiguous()
    rows, page_size = len(contexts.slots), keys.shape[1]
    tokens, kv_heads, head_dim = len(q) // max(rows, 1), k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    at_once = math.gcd(page_size, _KEYS)
    assert at_once >= 16, "pages have a multiple of 16 tokens"
    out = torch.empty_like(q)
    _block_attention[(triton.cdiv(tokens * group, _QUERIES), kv_heads, rows)](
        q, k, v, keys, values, contexts.page_table, contexts.slots, contexts.lengths, out, v.stride(0),
        contexts.page_table.stride(0), scale * math.log2(math.e), TOKENS=tokens, KV_HEADS=kv_heads, GROUP=group,
        HEAD_DIM=head_dim, COLUMNS=triton.next_power_of_2(head_dim), PAGE=page_size, KEYS=at_once,
        OWN=max(triton.next_power_of_2(tokens), 16), QUERIES=_QUERIES,
    )  # fmt: skip
    return out
