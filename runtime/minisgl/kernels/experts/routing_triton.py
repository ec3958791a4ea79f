"""Selection of each token's experts by scores that are not plain probabilities, on CUDA in one launch."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

MAX_EXPERTS = 1024
_LEAST = tl.constexpr(-3e38)
"""Lowest score of an expert, above that of lanes without one: any logits, NaN among them, select experts that exist."""


@triton.jit
def _route_by_scores(
    logits, bias, weights, experts, smallest_sum, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: one token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    start_next(PDL)
    wait_for_previous(PDL)
    logit = tl.load(logits + token * EXPERTS + expert, there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logit))
    else:
        shares = tl.exp(logit - tl.max(logit, 0))
        scores = shares / tl.sum(shares, 0)
    order = scores
    if BIASED:
        order += tl.load(bias + expert, there, other=0.0)
    # A comparison with NaN is false.
    order = tl.where(order > _LEAST, order, _LEAST)
    order = tl.where(there, order, float("-inf"))
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    weight = tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(order, 0).to(tl.int32)
        weight = tl.where(choice == i, tl.sum(tl.where(expert == best, scores, 0.0), 0), weight)
        chosen = tl.where(choice == i, best, chosen)
        order = tl.where(expert == best, float("-inf"), order)
    if RENORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight, 0), smallest_sum)
    at = token * TOP_K + choice
    tl.store(weights + at, weight * scale, choice < TOP_K)
    tl.store(experts + at, chosen, choice < TOP_K)


def route_by_scores_cuda(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    smallest_sum: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits` [T, E], contiguous, E <= MAX_EXPERTS, and `bias` [E] float32 to weights [T, K] float32 and experts
    [T, K] int32. Of equal scores the first is chosen."""
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        _route_by_scores[(tokens,)](
            logits, logits if bias is None else bias, weights, experts, smallest_sum, scale,
            EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts), TOP_K=top_k,
            CHOICES=triton.next_power_of_2(top_k), SIGMOID=sigmoid, BIASED=bias is not None, RENORMALIZE=renormalize,
            num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return weights, experts
