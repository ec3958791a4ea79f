"""Choice of the kernel for selected experts on a GPU, by shape alone, so that a captured step can be replayed.

T tokens, E experts, K choices of each token; the first line that fits, measured with benchmarks/experts.py:

| tokens | weights | kernel | why |
|---|---|---|---|
| T ≤ 3 | all | `gemv_gluon` | two launches, which can also select the experts, with many loads in flight at once |
| T K ≤ 24 E, MXFP4: 48 E | FP8, INT4, MXFP4 | `skinny_gluon` | weights go straight into the tensor cores' registers |
| T ≤ 2,048 | all | `grouped_gemm_triton` | larger tiles of tokens read the weights of an expert once |
| more | all | none | torch's grouped product is faster, behind a pass that dequantizes weights |

Other gates than SiLU are for `gemv_gluon` with 4 and 16 bits, biases with 4; both for `skinny_gluon` with MXFP4, and
`grouped_gemm_triton`. Experts without gates have 16 bits. Tokens are in 16 bits. A weight is its values and, in FP8,
INT4 or MXFP4, its scales.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from minisgl.kernels.experts import gemv_gluon, grouped_gemm_triton, skinny_gluon
from minisgl.kernels.experts.gate import SILU, Gate
from minisgl.kernels.experts.grouped_gemm_triton import Scales

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Biases: TypeAlias = tuple[torch.Tensor, torch.Tensor] | None


def select_and_run(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: Tensors,
    down: Tensors,
    top_k: int,
    gate: Gate,
    biases: Biases,
    *,
    renormalize: bool,
) -> torch.Tensor | None:
    """Select experts by their `logits` [T, E] and run them, if one kernel does both; otherwise None. `biases`: of
    gate_up [E, 2 N] and of down [E, hidden]."""
    scales = _scales(gate_up, down)
    if not _fits_vectors(x, down[0], top_k, scales, gate, biases):
        return None
    return gemv_gluon.run_experts_gemv(
        x, logits, None, gate_up[0], down[0], top_k, scales, gate, biases, renormalize=renormalize
    )


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Tensors,
    down: Tensors,
    gate: Gate,
    biases: Biases,
) -> torch.Tensor | None:
    """Run the selected `experts` [T, K], and add them up by their `weights`; None: no kernel is faster than torch's."""
    scales = _scales(gate_up, down)
    is_mxfp4 = scales is not None and scales.is_mxfp4
    is_plain = gate == SILU and biases is None
    if _fits_vectors(x, down[0], experts.shape[1], scales, gate, biases):
        return gemv_gluon.run_experts_gemv(
            x, weights, experts, gate_up[0], down[0], experts.shape[1], scales, gate, biases
        )
    if (
        scales is not None
        and (is_plain or (is_mxfp4 and not gate.gelu))
        and skinny_gluon.fits(x, down[0], experts.shape[1], padded=is_mxfp4)
    ):
        return skinny_gluon.run_experts_rows(x, weights, experts, gate_up[0], down[0], scales, gate, biases)
    if grouped_gemm_triton.fits(x, down[0], padded=is_mxfp4):
        return grouped_gemm_triton.run_experts_cuda(x, weights, experts, gate_up[0], down[0], scales, gate, biases)
    return None


def _fits_vectors(
    x: torch.Tensor, down: torch.Tensor, top_k: int, scales: Scales | None, gate: Gate, biases: Biases
) -> bool:
    padded = scales is not None and scales.is_mxfp4
    return gemv_gluon.supports(down, gate, biases) and gemv_gluon.fits(x, down, top_k, padded=padded)


def _scales(gate_up: Tensors, down: Tensors) -> Scales | None:
    return Scales(gate_up[1], down[1]) if len(down) > 1 else None
