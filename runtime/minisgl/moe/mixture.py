"""Mixture of experts (arXiv:1701.06538) behind its router: selection, selected experts, weighted sum."""

from __future__ import annotations

import torch

from minisgl.layers.activation import GatedActivation, silu_and_mul
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.new_weight import Weight
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
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        from minisgl.kernels import fp8_experts_vector_gluon as fp8

        if x.is_cuda and fp8.fits(x, len(down.values), top_k, down.shape[2]):
            return fp8.run_fp8_experts_vector(x, router_logits, *gate_up, *down, top_k, renormalize=renormalize)
    elif isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight):
        from minisgl.kernels import int4_experts_vector_gluon as int4

        if x.is_cuda and int4.fits(x, len(down.words), top_k, down.shape[2]):
            return int4.run_int4_experts_vector(x, router_logits, *gate_up, *down, top_k, renormalize=renormalize)
    elif (
        isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and x.is_cuda
        and activation is silu_and_mul
    ):
        from minisgl.kernels.experts_vector_gluon import fits, run_experts_vector

        if fits(x, len(down), top_k, down.shape[2]):
            return run_experts_vector(x, router_logits, gate_up, down, top_k, renormalize=renormalize)
    weights, experts = route(router_logits, top_k, renormalize=renormalize)
    return run_experts(x, weights, experts, gate_up, down, activation)
