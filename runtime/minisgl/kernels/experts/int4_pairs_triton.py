"""Pairs of each expert, and rows in the order of `skinny_gluon`, in one launch on CUDA."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.experts.grouped_gemm_triton import store_pairs
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _pairs_and_rows(
    experts, pairs_of, counts, x, rows, pairs, tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: the pairs of one expert, or behind all experts one row."""
    start_next(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    if program < EXPERTS:
        store_pairs(experts, pairs_of, counts, program, pairs, tokens, BLOCK)
    else:
        row = (program - EXPERTS).to(tl.int64)
        for begin in range(0, ROW, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            # As `in_thread_order`.
            k = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
            tl.store(rows + row * ROW + place, tl.load(x + row * HIDDEN + k, k < HIDDEN, other=0.0), place < ROW)


def pairs_and_rows(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, row: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`experts` [T, K] to the pairs of each expert in order [E, T], of which it has counts [E], both int32; and `x`
    [T, hidden] with its columns in the other order and zeros behind them, [T, row]. `hidden` is a multiple of 32."""
    tokens, hidden = x.shape
    pairs_of = torch.empty((num_experts, tokens), dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    rows = torch.empty((tokens, row), dtype=x.dtype, device=x.device)
    _pairs_and_rows[(num_experts + tokens,)](
        experts, pairs_of, counts, x, rows, experts.numel(), tokens, EXPERTS=num_experts, HIDDEN=hidden, ROW=row,
        BLOCK=1024, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return pairs_of, counts, rows
