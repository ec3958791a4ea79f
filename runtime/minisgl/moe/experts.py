"""Feed-forward of the selected experts.

N stands for the intermediate size on this rank: every rank holds 1/size of each expert, so load and memory are
equal for any routing. The caller sums over the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.layers.activation import GatedActivation, silu_and_mul
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.new_weight import Weight


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
) -> torch.Tensor:
    """x [T, H], weights and experts [T, K], gate_up [E, 2 N, H], down [E, H, N] to [T, H].

    With experts in FP8 or INT4, whose inputs are not quantized, the activation is SiLU. The order of sums is fixed on
    every device. On CUDA all shapes follow from T and nothing waits for the device, so the call can be captured in a
    graph, except where a GPU has no kernel for torch's grouped product.
    """
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return _run_quantized_experts(x, weights, experts, gate_up, down, activation)
    if x.is_cuda:
        from minisgl.kernels.experts_triton import fits, run_experts_cuda, weighted_sum

        if activation is silu_and_mul and fits(x, down):
            return run_experts_cuda(x, weights, experts, gate_up, down)
        if x.dtype == torch.bfloat16:
            chosen, places = experts_grouped(x, experts, gate_up, down, activation)
            return weighted_sum(chosen, weights, places)
        chosen = experts_dense(x, experts, gate_up, down, activation)
    else:
        chosen = experts_one_by_one(x, experts, gate_up, down, activation)
    return (chosen * weights.unsqueeze(-1)).sum(dim=1)


def _run_quantized_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
) -> torch.Tensor:
    assert not isinstance(gate_up, torch.Tensor) and not isinstance(down, torch.Tensor)
    assert activation is silu_and_mul
    if x.is_cuda:
        from minisgl.kernels import experts_rows_gluon as rows
        from minisgl.kernels.experts_triton import Scales, fits, run_experts_cuda

        (gate_ups, gate_up_scales), (downs, down_scales) = gate_up, down
        if rows.fits(x, downs, experts.shape[1]):
            return rows.run_experts_rows(x, weights, experts, gate_ups, gate_up_scales, downs, down_scales)
        if fits(x, downs):
            return run_experts_cuda(x, weights, experts, gate_ups, downs, Scales(gate_up_scales, down_scales))
    # With many tokens, the products take longer than this pass.
    return run_experts(x, weights, experts, _dense(gate_up, x.dtype), _dense(down, x.dtype), activation)


def _dense(weight: Fp8Weight | Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, Fp8Weight) and weight.values.is_cuda:
        from minisgl.kernels.dequantize_blocks_triton import dequantize_blocks

        return dequantize_blocks(*weight, dtype)
    return weight.dequantized().to(dtype)


def experts_one_by_one(
    x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: GatedActivation
) -> torch.Tensor:
    """Reference: selected experts one after the other. Returns [T, K, H]."""
    chosen = x.new_empty(*experts.shape, x.shape[-1])
    for expert in sorted(set(experts.flatten().tolist())):
        token, place = torch.where(experts == expert)
        chosen[token, place] = F.linear(activation(F.linear(x[token], gate_up[expert])), down[expert])
    return chosen


def experts_grouped(
    x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: GatedActivation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, then one grouped matrix product per projection: returns the sorted rows [T * K, H]
    and the row of each (token, choice) [T * K]."""
    top_k = experts.shape[1]
    sorted_experts, order = experts.flatten().sort(stable=True)
    ids = torch.arange(gate_up.shape[0], dtype=experts.dtype, device=x.device)
    ends = torch.searchsorted(sorted_experts, ids, right=True).to(torch.int32)
    inner = activation(F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends))
    outer = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return outer, places


def experts_dense(
    x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: GatedActivation
) -> torch.Tensor:
    """Every expert on every token: slow, for dtypes without a grouped matrix product. Returns [T, K, H]."""
    chosen = x.new_zeros(*experts.shape, x.shape[-1])
    for expert in range(gate_up.shape[0]):
        out = F.linear(activation(F.linear(x, gate_up[expert])), down[expert])
        chosen = torch.where((experts == expert).unsqueeze(-1), out.unsqueeze(1), chosen)
    return chosen
