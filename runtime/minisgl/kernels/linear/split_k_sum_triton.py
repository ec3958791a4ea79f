"""Sum of the partial sums of a product on CUDA, for consumers other than a norm, which adds them up by itself."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.pointwise.activation_triton import silu_times_up

_BLOCK = 512


@triton.jit
def _bias_of(bias, columns, mask, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    if BIAS:
        return tl.load(bias + columns, mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros((BLOCK,), tl.float32)


@triton.jit(do_not_specialize=["part_stride"])
def _sum_parts(
    parts, bias, out, part_stride, width,
    PARTS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: SiLU of the first `width` columns times the others."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = _bias_of(bias, columns, mask, BIAS, BLOCK)
    up = _bias_of(bias + width, columns, mask, BIAS and GATED, BLOCK)
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * width * (2 if GATED else 1) + columns
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride + at, mask, other=0.0)
        if GATED:
            up += tl.load(parts + part * part_stride + at + width, mask, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        total = silu_times_up(total, up, dtype)
    tl.store(out + row * width + columns, total.to(dtype), mask)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[parts, T, out] in float32 and `bias` [out] to their sum, [T, out] of `dtype`."""
    return _summed(parts, dtype, bias, gated=False)


def sum_parts_gated(parts: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """SiLU of the first half of the columns of that sum times the others: [parts, T, 2 n] to [T, n]."""
    return _summed(parts, dtype, bias, gated=True)


def _summed(parts: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    count, rows, columns = parts.shape
    width = columns // 2 if gated else columns
    assert parts.is_contiguous()
    out = torch.empty((rows, width), dtype=dtype, device=parts.device)
    _sum_parts[(rows, triton.cdiv(width, _BLOCK))](
        parts, parts if bias is None else bias, out, rows * columns, width, PARTS=count, BIAS=bias is not None,
        GATED=gated, BLOCK=_BLOCK, num_warps=4, **dependent_launch(parts.device),
    )  # fmt: skip
    return out
