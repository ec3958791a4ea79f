# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMSNorm on CUDA, with the addition to the residual stream in the same pass: one read and one write of each."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(x, residual, weight, out, x_stride, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * x_stride + columns, mask, other=0.0)
    if ADD:
        # The sum is rounded to the stream's dtype before it is normalized, as in two separate operations.
        value = (value.to(tl.float32) + tl.load(residual + row * width + columns, mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(residual + row * width + columns, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    gain = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (normed * gain).to(value.dtype), mask)


def rms_norm_cuda(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of `x` [T, h], or of `x` + `residual`, which the sum then replaces. Rows of `x` may be apart."""
    count, width = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    if count:
        block = triton.next_power_of_2(width)
        _add_rms_norm[(count,)](
            x, x if residual is None else residual, weight, out, x.stride(0), width, eps, ADD=residual is not None,
            BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out
