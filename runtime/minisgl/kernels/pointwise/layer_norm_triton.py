"""LayerNorm on CUDA, with the addition of the residual stream in the same pass: one read and one write of each."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit
def _add_layer_norm(
    x, residual, gain, bias, out, width, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scale = tl.load(gain + columns, mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask, other=0.0).to(tl.float32) if BIAS else 0.0
    start_next(PDL)
    wait_for_previous(PDL)
    place = row * width + columns
    value = tl.load(x + place, mask, other=0.0)
    if ADD:
        # Round the sum to the dtype of the stream before the norm, as two separate operations do.
        value = (value.to(tl.float32) + tl.load(residual + place, mask, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + place, value, mask)
    wide = value.to(tl.float32)
    centered = tl.where(mask, wide - tl.sum(wide, 0) / width, 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered, 0) / width + eps)
    tl.store(out + place, (normed * scale + shift).to(value.dtype), mask)


def layer_norm_cuda(
    x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Norm of `x` [T, h], contiguous, or of `x` + `residual`, which then overwrites `x`."""
    count, width = x.shape
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty_like(x)
    if count:
        block = triton.next_power_of_2(width)
        _add_layer_norm[(count,)](
            x, x if residual is None else residual, gain, gain if bias is None else bias, out, width, eps,
            ADD=residual is not None, BIAS=bias is not None, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **dependent_launch(x.device),
        )  # fmt: skip
    return out
