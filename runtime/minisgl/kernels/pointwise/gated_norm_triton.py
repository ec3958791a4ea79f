"""Norms with an output gate on CUDA, in one pass."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_NUMBERS = 2048
"""Numbers that a program normalizes."""


@triton.jit
def _gated_norm(
    heads, gate, gain, out, rows, gate_stride, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = row % GROUPS
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    # With the gate first each group has a gain of its own.
    of_gain = (group * WIDTH)[:, None] + column[None, :] if GATE_FIRST else row[:, None] * 0 + column[None, :]
    factor = tl.load(gain + of_gain, mask, other=0.0)
    start_next(PDL)
    wait_for_previous(PDL)
    value = tl.load(heads + row[:, None] * WIDTH + column[None, :], mask, other=0.0).to(tl.float32)
    of_gate = (row // GROUPS * gate_stride + group * WIDTH)[:, None] + column[None, :]
    opening = tl.load(gate + of_gate, mask, other=0.0).to(tl.float32)
    opening *= tl.sigmoid(opening)
    if GATE_FIRST:
        value *= opening
    normed = (value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]).to(factor.dtype)
    result = (factor * normed).to(tl.float32)
    if not GATE_FIRST:
        result *= opening
    tl.store(out + row[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask)


def gated_norm_cuda(
    heads: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, groups: int, eps: float, *, gate_first: bool
) -> torch.Tensor:
    """`heads`: outputs of all heads of T tokens, contiguous; rows of `gate` [T, width] may be parts of wider ones."""
    tokens, width = gate.shape
    assert heads.is_contiguous() and gate.stride(1) == 1
    out = gate.new_empty(tokens, width)
    size = width // groups
    block = triton.next_power_of_2(size)
    rows = max(_NUMBERS // block, 1)
    _gated_norm[(triton.cdiv(tokens * groups, rows),)](
        heads, gate, gain, out, tokens * groups, gate.stride(0), eps,
        GROUPS=groups, WIDTH=size, GATE_FIRST=gate_first, ROWS=rows, BLOCK=block, **dependent_launch(gate.device),
    )  # fmt: skip
    return out
