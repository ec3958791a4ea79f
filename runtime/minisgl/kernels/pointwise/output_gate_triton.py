"""Gates by a sigmoid on CUDA, in one pass. Results are rounded where separate operations would round."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_BLOCK = 1024


@triton.jit
def _open_heads(
    heads, gates, out, width, row_stride, HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    of_gate = column // HEAD_DIM * HEAD_STRIDE + column % HEAD_DIM
    gate = tl.load(gates + token * row_stride + of_gate, mask, other=0.0)
    opening = tl.sigmoid(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    value = tl.load(heads + token * width + column, mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, (value * opening).to(out.dtype.element_ty), mask)


def open_heads_cuda(heads: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`heads` contiguous; something may stand between the gates of two heads."""
    tokens, width = heads.shape
    assert heads.is_contiguous() and gates.stride(2) == 1
    out = torch.empty_like(heads)
    if tokens:
        _open_heads[(tokens, triton.cdiv(width, _BLOCK))](
            heads, gates, out, width, gates.stride(0), HEAD_STRIDE=gates.stride(1), HEAD_DIM=gates.shape[2],
            BLOCK=_BLOCK, **dependent_launch(heads.device),
        )  # fmt: skip
    return out


@triton.jit
def _add_gated(
    total, part, x, gate, out, width, hidden, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    inputs, column = tl.arange(0, HIDDEN), tl.arange(0, WIDTH)
    factor = tl.load(gate + inputs, inputs < hidden, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    value = tl.load(x + token * hidden + inputs, inputs < hidden, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    opening = tl.sigmoid(tl.sum(value * factor, 0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    mask = column < width
    added = tl.load(part + token * width + column, mask, other=0.0).to(tl.float32) * opening
    sum = tl.load(total + token * width + column, mask, other=0.0).to(tl.float32) + added.to(dtype).to(tl.float32)
    tl.store(out + token * width + column, sum.to(dtype), mask)


def add_gated_cuda(total: torch.Tensor, part: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    tokens, width = part.shape
    assert all(each.is_contiguous() for each in (total, part, x, gate))
    out = torch.empty_like(part)
    if tokens:
        columns = triton.next_power_of_2(width)
        _add_gated[(tokens,)](
            total, part, x, gate, out, width, x.shape[1], WIDTH=columns, HIDDEN=triton.next_power_of_2(x.shape[1]),
            num_warps=min(max(columns // 512, 1), 16), **dependent_launch(x.device),
        )  # fmt: skip
    return out
