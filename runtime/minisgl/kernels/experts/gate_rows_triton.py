"""Biases and activation between two grouped products of experts, on CUDA, in one pass."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.experts.gate import Gate
from minisgl.kernels.experts.grouped_gemm_triton import activated
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit
def _gate_rows(
    product, experts, bias, out, width,
    BLOCK: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK columns of one row."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    at = product + row * (2 * width) + column
    of_expert = bias + tl.load(experts + row).to(tl.int64) * (2 * width) + column
    gate = tl.load(at, there, other=0.0).to(tl.float32) + tl.load(of_expert, there, other=0.0).to(tl.float32)
    up = tl.load(at + width, there, other=0.0).to(tl.float32)
    up += tl.load(of_expert + width, there, other=0.0).to(tl.float32)
    value = activated(gate, up, out.dtype.element_ty, ALPHA, LIMIT, GELU)
    tl.store(out + row * width + column, value, there)


def gate_rows(product: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor, gate: Gate) -> torch.Tensor:
    """`product` [P, 2 N] of the experts of rows [P], and `bias` [E, 2 N], to the gated [P, N]; all are contiguous."""
    rows, width = len(product), product.shape[1] // 2
    assert gate.gated and product.is_contiguous() and experts.is_contiguous()
    out = torch.empty((rows, width), dtype=product.dtype, device=product.device)
    if rows:
        _gate_rows[(rows, triton.cdiv(width, 1024))](
            product, experts, bias, out, width, BLOCK=1024, ALPHA=gate.alpha, LIMIT=gate.limit, GELU=gate.gelu,
            num_warps=4, **dependent_launch(product.device),
        )  # fmt: skip
    return out
