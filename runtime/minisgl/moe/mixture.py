"""Mixture of experts (arXiv:1701.06538) behind its router: selection, selected experts, weighted sum."""

from __future__ import annotations

import torch

from minisgl.layers.activation import FeedForwardActivation
from minisgl.layers.weights.allocate import ExpertBiases
from minisgl.layers.weights.weight import Weight
from minisgl.moe.experts import gate_of, run_experts
from minisgl.moe.routing import route


def mixture_of_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: FeedForwardActivation,
    top_k: int,
    *,
    renormalize: bool,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """x [T, H], router_logits [T, E], gate_up [E, 2 N, H], down [E, H, N] to [T, H]."""
    if x.is_cuda and down.has_expert_kernels and (gate := gate_of(activation)) is not None:
        from minisgl.kernels.experts import choose

        both = gate_up.tensors, down.tensors
        out = choose.select_and_run(x, router_logits, *both, top_k, gate, biases, renormalize=renormalize)
        if out is not None:
            return out
    weights, chosen = route(router_logits, top_k, renormalize=renormalize)
    return run_experts(x, weights, chosen, gate_up, down, activation, biases)
