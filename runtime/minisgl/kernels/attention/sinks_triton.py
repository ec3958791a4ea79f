"""Sinks of attention heads behind a kernel that has none, on CUDA.

A sink is a score that takes part in the softmax and has no value. So it only makes the output smaller: by the share of
the sum of all other terms, which the kernel returns as its logarithm, in the whole sum."""

import math
from typing import Final

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

LOG2_E: Final = math.log2(math.e)
_VECTORS: Final = 8
"""Vectors of a program."""


@triton.jit
def share_beside_sink(sum_log2, sink):
    """Share of terms in a softmax beside a `sink`, a score in units of log e; `sum_log2`: logarithm of their sum."""
    return 1.0 / (1.0 + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - sum_log2))


@triton.jit(do_not_specialize=["vectors", "token_stride", "head_stride"])
def _scale_by_share(
    out, sums, sinks, vectors, token_stride, head_stride, unit,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VECTORS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: VECTORS heads of tokens."""
    start_next(PDL)
    wait_for_previous(PDL)
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    there = vector < vectors
    token, head = (vector // HEADS).to(tl.int64), vector % HEADS
    total = tl.load(sums + token * token_stride + head * head_stride, there, other=0.0) * unit
    share = share_beside_sink(total, tl.load(sinks + head))
    column = tl.arange(0, COLUMNS)
    place = out + vector.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    mask = there[:, None] & (column < HEAD_DIM)[None, :]
    value = tl.load(place, mask, other=0.0).to(tl.float32) * share[:, None]
    tl.store(place, value.to(out.dtype.element_ty), mask)


def scale_by_share(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor, *, natural: bool) -> None:
    """Take `sinks` [Hq] into account in `out` [T, Hq, D], contiguous, the attention without them. `sums` [T, Hq]
    float32 of any strides: logarithms of the sums of the softmax, `natural` or to base 2."""
    tokens, heads, head_dim = out.shape
    assert out.is_contiguous() and sums.shape == (tokens, heads)
    if tokens:
        _scale_by_share[(triton.cdiv(tokens * heads, _VECTORS),)](
            out, sums, sinks, tokens * heads, *sums.stride(), LOG2_E if natural else 1.0, HEADS=heads,
            HEAD_DIM=head_dim, VECTORS=_VECTORS, COLUMNS=triton.next_power_of_2(head_dim), num_warps=4,
            **dependent_launch(out.device),
        )  # fmt: skip
