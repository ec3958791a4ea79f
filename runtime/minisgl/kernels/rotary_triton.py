# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Per-head RMSNorm and rotary embedding of queries and keys on CUDA: one program turns all heads of one token."""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_rope(
    q, k, q_out, k_out, cos_sin, q_weight, k_weight, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    is_query = head < Q_HEADS
    mask = (head < Q_HEADS + K_HEADS) & (pair < HALF)
    place = tl.where(is_query, head, head - Q_HEADS) * (2 * HALF) + pair
    source = tl.where(is_query, q + token * q_stride + place, k + token * k_stride + place)
    first = tl.load(source, mask, other=0.0)
    second = tl.load(source + HALF, mask, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        gains = tl.where(is_query, q_weight + pair, k_weight + pair)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        # Rounded where separate operations would round.
        gain = tl.load(gains, mask, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
        gain = tl.load(gains + HALF, mask, other=0.0).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
    cos = tl.load(cos_sin + token * (2 * HALF) + pair, pair < HALF, other=0.0)
    sin = tl.load(cos_sin + token * (2 * HALF) + HALF + pair, pair < HALF, other=0.0)
    target = tl.where(
        is_query,
        q_out + token * (Q_HEADS * 2 * HALF) + place,
        k_out + token * (K_HEADS * 2 * HALF) + place,
    )
    tl.store(target, (first * cos - second * sin).to(dtype), mask)
    tl.store(target + HALF, (second * cos + first * sin).to(dtype), mask)


def qk_norm_rope_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D], heads of a token side by side, to contiguous tensors of the same shapes."""
    count, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == 1 and q.stride(1) == k.stride(1) == head_dim
    assert cos_sin.is_contiguous()
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if count:
        half = head_dim // 2
        heads, pairs = triton.next_power_of_2(q_heads + k_heads), triton.next_power_of_2(half)
        _norm_rope[(count,)](
            q, k, q_out, k_out, cos_sin, q if q_weight is None else q_weight, k if k_weight is None else k_weight,
            q.stride(0), k.stride(0), eps, Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, NORM=q_weight is not None,
            HEADS=heads, PAIRS=pairs, num_warps=min(max(heads * pairs // 512, 1), 8),
        )  # fmt: skip
    return q_out, k_out
