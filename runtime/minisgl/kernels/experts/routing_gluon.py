"""Selection of each token's experts on CUDA, in one launch instead of a softmax, a sort and a division.

It is written in Gluon, Triton's lower level, because a layout there can give each warp its own token, whose best expert
takes one instruction.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch

MAX_EXPERTS = 512
_WARPS = 4

NO_EXPERT = gl.constexpr(-0x80000000)
"""Key below that of any expert."""


@gluon.jit
def expert_keys(logit, expert, EXPERTS: gl.constexpr):
    """Key of each expert: its logit in 16 bits, then its number counted from the end. The best expert has the largest
    key, and no two keys are equal."""
    # Map −0 to +0.
    bits = (logit.to(gl.float32) + 0.0).to(logit.dtype).to(gl.int16, bitcast=True)
    # Negative numbers with larger bits are smaller.
    ordered = (bits ^ ((bits >> 15) & 0x7FFF)).to(gl.int32)
    # NO_EXPERT, but module constants are not part of the names of kernels that share a function.
    return gl.where(expert < EXPERTS, (ordered << 16) | (0xFFFF - expert), -0x80000000)


@gluon.jit
def expert_of(key):
    return 0xFFFF - (key & 0xFFFF)


@gluon.jit
def logit_of(key, dtype: gl.constexpr):
    ordered = (key >> 16).to(gl.int16)
    return (ordered ^ ((ordered >> 15) & 0x7FFF)).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit(do_not_specialize=["tokens"])
def _route(
    logits, weights, experts, tokens,
    EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr, RENORMALIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one token."""
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = logits.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [warps, 1], [1, 0])
    token = gl.program_id(0) * warps + gl.arange(0, warps, layout=gl.SliceLayout(1, layout))
    expert = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    there = token < tokens
    start_next(PDL)
    wait_for_previous(PDL)
    logit = gl.load(logits + token[:, None] * EXPERTS + expert, there[:, None] & (expert < EXPERTS), other=0.0)
    keys = expert_keys(logit, expert, EXPERTS)
    highest = logit_of(gl.max(keys, 1), dtype)
    total = gl.zeros([warps], gl.float32, layout=gl.SliceLayout(1, layout))
    if not RENORMALIZE:
        shares = gl.exp(logit_of(keys, dtype) - highest[:, None])
        total = gl.sum(gl.where(keys == NO_EXPERT, 0.0, shares), 1)
    chosen = ()
    for _ in gl.static_range(TOP_K):
        best = gl.max(keys, 1)
        keys = gl.where(keys == best[:, None], NO_EXPERT, keys)
        chosen = chosen + (best,)
        if RENORMALIZE:
            total += gl.exp(logit_of(best, dtype) - highest)
    for choice in gl.static_range(TOP_K):
        at = token * TOP_K + choice
        share = gl.exp(logit_of(chosen[choice], dtype) - highest) / total
        gl.store(weights + at, share.to(dtype), there)
        gl.store(experts + at, expert_of(chosen[choice]), there)


def route_cuda(logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits` [T, E] in 16 bits, contiguous, E <= MAX_EXPERTS, to weights [T, K] of their dtype and experts [T, K]
    int32."""
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(triton.cdiv(tokens, _WARPS),)](
            logits, weights, experts, tokens, EXPERTS=num_experts, BLOCK=block_of(num_experts), TOP_K=top_k,
            RENORMALIZE=renormalize, num_warps=_WARPS, **dependent_launch(logits.device),
        )  # fmt: skip
    return weights, experts


def block_of(num_experts: int) -> int:
    """At least one expert per lane."""
    return max(1 << (num_experts - 1).bit_length(), 32)
