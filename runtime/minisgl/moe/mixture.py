"""Mixture of experts (arXiv:1701.06538) behind its router: selection, selected experts, weighted sum."""

from __future__ import annotations

import torch

from minisgl.layers.activation import GatedActivation, silu_and_mul
from minisgl.layers.weights.weight import Weight
from minisgl.moe.experts import run_experts


def mixture_of_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
    top_k: int,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """x [T, H], router_logits [T, E], gate_up [E, 2 N, H], down [E, H, N] to [T, H]."""
    if x.is_cuda and activation is silu_and_mul and down.has_expert_kernels:
        from minisgl.kernels.experts import choose

        both = gate_up.tensors, down.tensors
        out = choose.select_and_run(x, router_logits, *both, top_k, renormalize=renormalize)
        if out is not None:
            return out
    weights, chosen = route(router_logits, top_k, renormalize=renormalize)
    return run_experts(x, weights, chosen, gate_up, down, activation)


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] to (weights [T, K] in the logits' dtype, expert ids [T, K] int32 or int64).

    Probabilities are taken in float32 over all experts; `renormalize` makes the selected ones sum to 1.
    """
    if router_logits.is_cuda and router_logits.dtype in (torch.bfloat16, torch.float16):
        from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, route_cuda

        if router_logits.shape[1] <= MAX_EXPERTS:
            return route_cuda(router_logits, top_k, renormalize=renormalize)
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), experts
