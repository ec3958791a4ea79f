"""Mixture of experts (arXiv:1701.06538) behind its router: selection, selected experts, weighted sum."""

from __future__ import annotations

import torch

from minisgl.layers.activation import GatedActivation, silu_and_mul
from minisgl.layers.weights.weight import Weight
from minisgl.moe.experts import run_experts
from minisgl.moe.routing import route


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
    if x.is_cuda and activation is silu_and_mul:
        for kernel in down.expert_kernels().routing:
            if kernel.fits(x, top_k):
                tensors = *gate_up.tensors, *down.tensors
                return kernel.run(x, router_logits, *tensors, top_k, renormalize=renormalize)
    weights, chosen = route(router_logits, top_k, renormalize=renormalize)
    return run_experts(x, weights, chosen, gate_up, down, activation)
