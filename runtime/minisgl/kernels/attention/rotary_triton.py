"""`rotate_and_store` on CUDA: one launch, one read of the projection's output. A program takes a few heads of one
token: only queries, only keys or only values."""

import math

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import FP8, UNSCALED, KVScales
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit
def as_stored(x, inverse_scale, pool):
    """`x` as the memory behind the pointers `pool` stores it, see `stored_kv.as_stored`."""
    dtype: tl.constexpr = pool.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * inverse_scale, -448.0), 448.0)
    return x.to(dtype)


_MOST_HEADS = 8


@triton.jit
def turned(
    source, place, mask, cos, sin, first_gain, second_gain, eps, HALF: tl.constexpr, NORM: tl.constexpr,
    ROUND_LAST: tl.constexpr = False,
):  # fmt: skip
    """Both halves of the heads at `source` + `place` [heads, pairs], rounded where separate operations would round."""
    first = tl.load(source + place, mask, other=0.0)
    second = tl.load(source + place + HALF, mask, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first, second = first * scale, second * scale
        if not ROUND_LAST:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first = (first * first_gain).to(dtype).to(tl.float32)
        second = (second * second_gain).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _store(
    first, second, place, mask, pool, location, kept, kept_row, inverse, WIDTH: tl.constexpr, HALF: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Store both halves of some heads at `location` of the pool and, with KEEP, what it then holds as `kept_row`; rows
    before 0 are not kept."""
    first, second = as_stored(first, inverse, pool), as_stored(second, inverse, pool)
    target = pool + location * WIDTH + place
    tl.store(target, first, mask)
    tl.store(target + HALF, second, mask)
    if KEEP:  # noqa: SIM102 (one is known when it is compiled)
        if kept_row >= 0:
            copy = kept + kept_row * WIDTH + place
            tl.store(copy, first.to(kept.dtype.element_ty), mask)
            tl.store(copy + HALF, second.to(kept.dtype.element_ty), mask)


# `kept_from` changes with every step: compile one kernel for all values.
@triton.jit(do_not_specialize=["kept_from"])
def _rotate_and_store(
    q, k, v, cos_sin, q_gain, k_gain, q_out, kept_keys, kept_values, keys, values, locations, q_stride, k_stride,
    v_stride, kept_from, eps, key_inverse, value_inverse, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ROUND_LAST: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    pair = tl.arange(0, PAIRS)[None, :]
    mask = pair < HALF
    first_gain, second_gain = 1.0, 1.0
    if NORM:
        # One address per head, so that every thread loads its own values.
        gain = tl.broadcast_to(tl.where(head < Q_HEADS, q_gain, k_gain) + pair, (HEADS, PAIRS))
        first_gain = tl.load(gain, mask, other=0.0).to(tl.float32)
        second_gain = tl.load(gain + HALF, mask, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            first_gain, second_gain = first_gain + 1.0, second_gain + 1.0
    start_next(PDL)
    wait_for_previous(PDL)
    place = tl.arange(0, HEADS)[:, None] * (2 * HALF) + pair
    if head < Q_HEADS + K_HEADS:
        angle = tl.broadcast_to(cos_sin + token * (2 * HALF) + pair, (HEADS, PAIRS))
        cos = tl.load(angle, mask, other=0.0)
        sin = tl.load(angle + HALF, mask, other=0.0)
        if head < Q_HEADS:
            source_place = (head + tl.arange(0, HEADS)[:, None]) * Q_HEAD_STRIDE + pair
            place += head * (2 * HALF)
            first, second = turned(
                q + token * q_stride, source_place, mask, cos, sin, first_gain, second_gain, eps, HALF, NORM,
                ROUND_LAST,
            )  # fmt: skip
            target = q_out + token * (Q_HEADS * 2 * HALF) + place
            tl.store(target, first, mask)
            tl.store(target + HALF, second, mask)
        else:
            place += (head - Q_HEADS) * (2 * HALF)
            first, second = turned(
                k + token * k_stride, place, mask, cos, sin, first_gain, second_gain, eps, HALF, NORM, ROUND_LAST
            )
            _store(
                first, second, place, mask, keys, tl.load(locations + token), kept_keys, token - kept_from,
                key_inverse, K_HEADS * 2 * HALF, HALF, True,
            )  # fmt: skip
    else:
        place += (head - Q_HEADS - K_HEADS) * (2 * HALF)
        source = v + token * v_stride + place
        _store(
            tl.load(source, mask), tl.load(source + HALF, mask), place, mask, values, tl.load(locations + token),
            kept_values, token - kept_from, value_inverse, K_HEADS * 2 * HALF, HALF, ROUNDS,
        )  # fmt: skip


def rotate_and_store_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    locations: torch.Tensor,
    kept_from: int,
    scales: KVScales,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    # Something may stand between the queries of two heads.
    assert q.stride(2) == 1 and all(part.stride(2) == 1 and part.stride(1) == head_dim for part in (k, v))
    assert keys.is_contiguous() and values.is_contiguous() and rotation.cos_sin.is_contiguous()
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kept_keys = torch.empty((count - kept_from, k_heads, head_dim), dtype=k.dtype, device=k.device)
    rounds = values.dtype == FP8
    kept_values = torch.empty_like(kept_keys) if rounds else v[kept_from:]
    if count:
        # All heads of a program are of one kind, and their number is a power of two.
        together = math.gcd(q_heads, k_heads, _MOST_HEADS)
        pairs = triton.next_power_of_2(head_dim // 2)
        norm = rotation.q_gain is not None
        _rotate_and_store[(count, (q_heads + 2 * k_heads) // together)](
            q, k, v, rotation.cos_sin, rotation.q_gain if norm else q, rotation.k_gain if norm else k, q_out,
            kept_keys, kept_values, keys, values, locations, q.stride(0), k.stride(0), v.stride(0), kept_from,
            rotation.eps, 1.0 / scales.key, 1.0 / scales.value, Q_HEADS=q_heads, K_HEADS=k_heads,
            Q_HEAD_STRIDE=q.stride(1), HALF=head_dim // 2, NORM=norm, UNIT_OFFSET=rotation.unit_offset,
            ROUND_LAST=rotation.round_last, HEADS=together, PAIRS=pairs, ROUNDS=rounds,
            num_warps=max(together * pairs // 256, 1), **dependent_launch(q.device),
        )  # fmt: skip
    return q_out, kept_keys, kept_values


def rotate_queries_cuda(q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    none = q[:, :0]
    locations = none.view(torch.int16)
    out, _, _ = rotate_and_store_cuda(q, none, none, rotation, none, none, locations, len(q), UNSCALED)
    return out
