"""Kernels of experts with quantized weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.layers.weights.weight import ExpertKernels, Kernel, QuantizedWeight


def quantized_expert_kernels(
    down: QuantizedWeight, fits_vector: Callable[..., bool], run_vector: Callable[..., torch.Tensor]
) -> ExpertKernels:
    """Kernels of experts in FP8 blocks or INT4, of which each kind has its own for a few tokens."""
    from minisgl.kernels.experts import grouped_gemm_triton as tiles
    from minisgl.kernels.experts import skinny_gluon as rows

    def run_tiles(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *both: torch.Tensor) -> torch.Tensor:
        gate_up, gate_up_scales, values, scales = both
        return tiles.run_experts_cuda(x, weights, experts, gate_up, values, tiles.Scales(gate_up_scales, scales))

    experts, _, width = down.shape
    routing = Kernel(lambda x, top_k: fits_vector(x, experts, top_k, width), run_vector)
    by_rows = Kernel(lambda x, top_k: rows.fits(x, down.values, top_k), rows.run_experts_rows)
    return ExpertKernels([routing], [by_rows, Kernel(lambda x, top_k: tiles.fits(x, down.values), run_tiles)])
