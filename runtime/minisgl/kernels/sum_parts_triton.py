# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sum of the partial sums of a product on CUDA, for consumers other than a norm, which adds them up by itself."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_BLOCK = 512


@triton.jit(do_not_specialize=["part_stride"])
def _sum_parts(
    parts, bias, out, part_stride, width,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        total += tl.load(bias + columns, mask, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * width + columns
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride + at, mask, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[parts, T, out] in float32 and `bias` [out] to their sum, [T, out] of `dtype`."""
    count, rows, width = parts.shape
    assert parts.is_contiguous()
    out = torch.empty((rows, width), dtype=dtype, device=parts.device)
    _sum_parts[(rows, triton.cdiv(width, _BLOCK))](
        parts, parts if bias is None else bias, out, rows * width, width, PARTS=count, BIAS=bias is not None,
        BLOCK=_BLOCK, num_warps=4, **dependent_launch(parts.device),
    )  # fmt: skip
    return out
