"""Attention of prompt segments over the paged KV pool (FlashAttention; arXiv:2205.14135), for what the packages'
kernels lack: heads of 512, windows and bounded scores in CUDA graphs, and GPUs without these packages.

Each program computes a tile of query vectors, the tokens of a segment times the query heads of one KV head, and reads
the pages that these attend to. Programs find their segment on the device, so a captured launch serves segments of any
lengths. Exponentials are to base 2.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.sinks_triton import LOG2_E, share_beside_sink
from minisgl.kernels.attention.stored_kv import KVScales

_SEGMENTS: Final = tl.constexpr(64)
"""Segments whose tiles a program counts at a time."""


class Tiles(NamedTuple):
    """Sizes of a launch."""

    vectors: int
    """Query vectors of a program."""
    keys: int
    """Keys that a program reads at a time, all in one page."""
    warps: int
    stages: int


class Segments(NamedTuple):
    """Segments of a step, see `AttentionBatch`."""

    page_table: torch.Tensor
    slots: torch.Tensor
    query_offsets: torch.Tensor
    kv_lengths: torch.Tensor


def choose_tiles(head_dim: int, page_size: int) -> Tiles:
    """Tiles whose accumulators fit into registers and whose keys and values into shared memory of a Hopper GPU."""
    if head_dim > 256:
        return Tiles(64, min(32, page_size), 8, 2)
    return Tiles(128, min(64, page_size), 8, 2 if head_dim > 128 else 3)


@triton.jit
def _segment_of(tile, query_offsets, segments, GROUP: tl.constexpr, VECTORS: tl.constexpr):
    """Segment of a tile, and the number of tiles of those before it. Behind the last tile: `segments`."""
    segment = 0
    before = 0
    counted = 0
    for first in range(0, segments, _SEGMENTS):
        at = first + tl.arange(0, _SEGMENTS)
        there = at < segments
        begin = tl.load(query_offsets + at, there, other=0)
        end = tl.load(query_offsets + at + 1, there, other=0)
        tiles = ((end - begin) * GROUP + VECTORS - 1) // VECTORS
        passed = (counted + tl.cumsum(tiles, 0) <= tile) & there
        segment += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        counted += tl.sum(tiles, 0)
    return segment, before


@triton.jit
def _bounded(score, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(score / SOFTCAP); tanh(y) is 1 - 2 / (1 + e^(2 y))."""
    power = tl.exp2(score * (2.0 * 1.4426950408889634 / SOFTCAP))
    return SOFTCAP * (1.0 - 2.0 / (1.0 + power))


@triton.jit(
    do_not_specialize=["segments", "pages_per_row"],
    do_not_specialize_on_alignment=["slots", "query_offsets", "kv_lengths"],
)
def _attend_tile(
    q, keys, values, sinks, out, page_table, slots, query_offsets, kv_lengths, segments, pages_per_row, q_stride, scale,
    value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Each program: VECTORS queries of one KV head. WINDOW, SOFTCAP: 0 for none."""
    # The last tiles of a prompt attend to the most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    segment, before = _segment_of(tile, query_offsets, segments, GROUP, VECTORS)
    if segment < segments:
        offset = tl.load(query_offsets + segment)
        length = tl.load(query_offsets + segment + 1) - offset
        start = tl.load(kv_lengths + segment) - length
        page_row = page_table + tl.load(slots + segment).to(tl.int64) * pages_per_row
        lowest = (tile - before) * VECTORS
        vector = lowest + tl.arange(0, VECTORS)
        token = vector // GROUP
        inside = token < length
        head = kv_head * GROUP + vector % GROUP
        position = start + token
        column = tl.arange(0, HEAD_DIM)
        row = (offset + token).to(tl.int64)
        query = tl.load(
            q + (row * q_stride + head * HEAD_DIM)[:, None] + column[None, :], inside[:, None], other=0.0
        )
        end = start + tl.minimum((lowest + VECTORS - 1) // GROUP + 1, length)
        first = tl.maximum(start + lowest // GROUP + 1 - WINDOW, 0) if WINDOW else 0
        best = tl.full([VECTORS], float("-inf"), tl.float32)
        total = tl.zeros([VECTORS], tl.float32)
        result = tl.zeros([VECTORS, HEAD_DIM], tl.float32)
        for place in range(first // KEYS * KEYS, end, KEYS):
            at = place + tl.arange(0, KEYS)
            # Pages before the window are another's, and positions behind the end were never written.
            there = (at < end) & (at >= first) if WINDOW else at < end
            page = tl.load(page_row + place // PAGE).to(tl.int64)
            stored = ((page * PAGE + at % PAGE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
            key = tl.load(keys + stored, there[:, None], other=0.0).to(query.dtype)
            value = tl.load(values + stored, there[:, None], other=0.0).to(query.dtype)
            score = tl.dot(query, tl.trans(key)) * scale
            if SOFTCAP > 0:
                score = _bounded(score, SOFTCAP) * 1.4426950408889634
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen &= at[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
            highest = tl.maximum(best, tl.max(score, 1))
            # Before the first key of a window there is no highest score, but the differences must be finite.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.sum(weight, 1)
            result = tl.dot(weight.to(query.dtype), value, result * shrink[:, None])
            best = highest
        share = value_scale / total
        if SINKS:
            share *= share_beside_sink(best + tl.log2(total), tl.load(sinks + head))
        written = out + ((row * KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + column[None, :]
        tl.store(written, (result * share[:, None]).to(out.dtype.element_ty), inside[:, None])


def attend_paged(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    segments: Segments,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    scales: KVScales,
    window: int | None,
    softcap: float | None,
) -> None:
    """Write causal attention of `q` [T, Hq, D], whose last two dimensions are contiguous, to `out` [T, Hq, D],
    contiguous. `keys` and `values` [pages, page, Hkv, D] have the tokens of the step. `sinks` [Hq]. Tokens behind the
    last segment are not written."""
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    tiles = choose_tiles(head_dim, page_size)
    group, count = heads // kv_heads, len(segments.slots)
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous() and page_size % tiles.keys == 0
    # Each segment has at most one tile that is not full.
    grid = (tokens * group // tiles.vectors + min(count, tokens), kv_heads)
    factor = scale * scales.key
    _attend_tile[grid](
        q, keys, values, q if sinks is None else sinks, out, segments.page_table, segments.slots,
        segments.query_offsets, segments.kv_lengths, count, segments.page_table.stride(0), q.stride(0),
        factor if softcap else factor * LOG2_E, scales.value, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        PAGE=page_size, VECTORS=tiles.vectors, KEYS=tiles.keys, WINDOW=window or 0, SOFTCAP=softcap or 0.0,
        SINKS=sinks is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
