"""RMSNorm on CUDA, with the addition to the residual stream in the same pass: one read and one write of each."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, part_stride, x_stride, width, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROUND_LAST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gain = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        gain += 1.0
    start_next(PDL)
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + columns, mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * part_stride + row * x_stride + columns, mask, other=0.0)
    value = value.to(out.dtype.element_ty)
    if ADD:
        # Round the sum to the dtype of the stream before the norm, as two separate operations do.
        value = (value.to(tl.float32) + tl.load(residual + row * width + columns, mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(residual + row * width + columns, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale
    if not ROUND_LAST:
        normed = normed.to(value.dtype).to(tl.float32)
    tl.store(out + row * width + columns, (normed * gain).to(value.dtype), mask)


def rms_norm_cuda(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    round_last: bool = False,
) -> torch.Tensor:
    """Norm of `x` [T, h], or of `x` + `residual`, which the sum overwrites. Rows of `x` need not be contiguous. `x` may
    also be partial sums [parts, T, h] in float32, whose total is first rounded to the dtype of the weight."""
    count, width = x.shape[-2:]
    parts = len(x) if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty((count, width), dtype=weight.dtype, device=x.device)
    if count:
        block = triton.next_power_of_2(width)
        # With fewer elements of each part, a thread has more loads in flight.
        elements = 16 if parts == 1 else 8
        _add_rms_norm[(count,)](
            x, x if residual is None else residual, weight, out, x.stride(0), x.stride(-2), width, eps, PARTS=parts,
            ADD=residual is not None, UNIT_OFFSET=unit_offset, ROUND_LAST=round_last,
            BLOCK=block, num_warps=min(max(block // (32 * elements), 1), 16),
            **dependent_launch(x.device),
        )  # fmt: skip
    return out
