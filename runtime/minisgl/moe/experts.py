"""Feed-forward of the selected experts.

N stands for the intermediate size on this rank: every rank holds 1/size of each expert, so load and memory are
equal for any routing. The caller sums over the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.kernels.experts.gate import GELU_TANH, RELU_SQUARED, SILU, Gate
from minisgl.layers.activation import (
    ClampedGate,
    FeedForwardActivation,
    gelu_tanh_and_mul,
    relu_squared,
    silu_and_mul,
)
from minisgl.layers.weights.allocate import ExpertBiases
from minisgl.layers.weights.weight import Weight


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: FeedForwardActivation,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """x [T, H], weights (of x's type or float32) and experts [T, K], gate_up [E, 2 N, H], or without gates
    [E, N, H], and down [E, H, N] to [T, H].

    The order of sums is fixed on every device. On CUDA all shapes follow from T and nothing waits for the device, so
    the call can be captured in a graph, except where a GPU has no kernel for torch's grouped product.
    """
    if x.is_cuda and down.has_expert_kernels and (gate := gate_of(activation)) is not None:
        from minisgl.kernels.experts import choose

        out = choose.run(x, weights, experts, gate_up.tensors, down.tensors, gate, biases)
        if out is not None:
            return out
    # With many tokens, the products take longer than this pass over quantized weights.
    dense = gate_up.dequantized(x.dtype), down.dequantized(x.dtype)
    if x.is_cuda and x.dtype == torch.bfloat16:
        from minisgl.kernels.experts.grouped_gemm_triton import weighted_sum

        chosen, places = experts_grouped(x, experts, *dense, activation, biases)
        return weighted_sum(chosen, weights, places, experts, None if biases is None else biases.down)
    chosen = (experts_dense if x.is_cuda else experts_one_by_one)(x, experts, *dense, activation, biases)
    return (chosen * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def gate_of(activation: FeedForwardActivation) -> Gate | None:
    """The activation as kernels of experts take it; None: they have none."""
    if isinstance(activation, ClampedGate):
        return Gate(activation.alpha, activation.limit)
    if activation is gelu_tanh_and_mul:
        return GELU_TANH
    if activation is relu_squared:
        return RELU_SQUARED
    return SILU if activation is silu_and_mul else None


def experts_one_by_one(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: FeedForwardActivation,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Reference: selected experts one after the other. Returns [T, K, H]."""
    chosen = x.new_empty(*experts.shape, x.shape[-1])
    for expert in sorted(set(experts.flatten().tolist())):
        token, place = torch.where(experts == expert)
        chosen[token, place] = _expert(x[token], expert, gate_up, down, activation, biases)
    return chosen


def _expert(
    x: torch.Tensor,
    expert: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: FeedForwardActivation,
    biases: ExpertBiases | None,
) -> torch.Tensor:
    """All tokens [T, H] by one expert."""
    first, second = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
    inner = activation(F.linear(x, gate_up[expert], first))[:, : down.shape[2]]
    return F.linear(inner, down[expert], second)


def experts_grouped(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: FeedForwardActivation,
    biases: ExpertBiases | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, then one grouped matrix product per projection: returns the sorted rows [T * K, H]
    without the bias of the second one, and the row of each (token, choice) [T * K]."""
    top_k = experts.shape[1]
    sorted_experts, order = experts.flatten().sort(stable=True)
    ids = torch.arange(gate_up.shape[0], dtype=experts.dtype, device=x.device)
    ends = torch.searchsorted(sorted_experts, ids, right=True).to(torch.int32)
    product = F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    if biases is None:
        inner = activation(product)
    elif x.is_cuda and (gate := gate_of(activation)) is not None:
        from minisgl.kernels.experts.gate_rows_triton import gate_rows

        inner = gate_rows(product, sorted_experts, biases.gate_up, gate)
    else:
        inner = activation(product + biases.gate_up[sorted_experts])
    # Weights that stay quantized may have rows of padding.
    outer = F.grouped_mm(inner[:, : down.shape[2]], down.transpose(1, 2), offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return outer, places


def experts_dense(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: FeedForwardActivation,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Every expert on every token: slow, for dtypes without a grouped matrix product. Returns [T, K, H]."""
    chosen = x.new_zeros(*experts.shape, x.shape[-1])
    for expert in range(gate_up.shape[0]):
        out = _expert(x, expert, gate_up, down, activation, biases)
        chosen = torch.where((experts == expert).unsqueeze(-1), out.unsqueeze(1), chosen)
    return chosen
