"""Choice of the kernel for selected experts on a GPU, by shape alone, so that a captured step can be replayed.

T tokens, E experts, K choices of each token; the first line that fits, measured with benchmarks/experts.py:

| tokens | weights | kernel | why |
|---|---|---|---|
| T ≤ 3 | all | `gemv_gluon` | two launches, which also select the experts, with all loads in flight at once |
| T K ≤ 24 E | FP8, INT4 | `skinny_gluon` | weights go straight into the tensor cores' registers, for up to 16 tokens |
| T ≤ 2,048 | all | `grouped_gemm_triton` | larger tiles of tokens read the weights of an expert once |
| more | all | none | torch's grouped product is faster, behind a pass that dequantizes weights |

Tokens are in 16 bits. A weight is its values and, in FP8 or INT4, its scales.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from minisgl.kernels.experts import gemv_gluon, grouped_gemm_triton, skinny_gluon
from minisgl.kernels.experts.grouped_gemm_triton import Scales

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def select_and_run(
    x: torch.Tensor, logits: torch.Tensor, gate_up: Tensors, down: Tensors, top_k: int, *, renormalize: bool
) -> torch.Tensor | None:
    """Select experts by their `logits` [T, E] and run them, with SiLU, if one kernel does both; otherwise None."""
    if not gemv_gluon.fits(x, down[0], top_k):
        return None
    scales = _scales(gate_up, down)
    return gemv_gluon.run_experts_gemv(x, logits, gate_up[0], down[0], top_k, scales, renormalize=renormalize)


def run(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Tensors, down: Tensors
) -> torch.Tensor | None:
    """Run the selected `experts` [T, K] with SiLU, and add them up by their `weights`; None: no kernel is faster than
    torch's."""
    scales = _scales(gate_up, down)
    if scales is not None and skinny_gluon.fits(x, down[0], experts.shape[1]):
        return skinny_gluon.run_experts_rows(x, weights, experts, gate_up[0], down[0], scales)
    if grouped_gemm_triton.fits(x, down[0]):
        return grouped_gemm_triton.run_experts_cuda(x, weights, experts, gate_up[0], down[0], scales)
    return None


def _scales(gate_up: Tensors, down: Tensors) -> Scales | None:
    return Scales(gate_up[1], down[1]) if len(down) > 1 else None
