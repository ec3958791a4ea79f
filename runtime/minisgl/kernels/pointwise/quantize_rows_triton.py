"""Activations to FP8 on CUDA: alone, behind SiLU × up, and behind the norm at the beginning of a block."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.pointwise.activation_triton import silu_times_up
from minisgl.kernels.pointwise.fp8_rows import BLOCK, E4M3_MAX, SMALLEST, Fp8Rows, new_fp8_rows

_COLUMNS = 1024
"""Columns of a program, where a row has several programs."""


@triton.jit
def store_fp8(
    value, values, scales, row, column, width, scale_rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Store COLUMNS values of a row from `column` on as FP8, with a scale per BLOCK of them: 128, or all of a row that
    is padded with zeros."""
    blocks = tl.reshape(value.to(tl.float32), (COLUMNS // BLOCK, BLOCK))
    largest = tl.maximum(tl.max(tl.abs(blocks), 1), SMALLEST)
    # Rounded as torch does: otherwise numbers halfway between two of FP8 would differ.
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    inverse = tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    block = column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    there = block * BLOCK < width
    tl.store(scales + block * scale_rows + row, scale, there)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    quantized = (blocks * inverse[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * width + place, quantized, place < width if BLOCK == COLUMNS else there[:, None])


@triton.jit(do_not_specialize=["scale_rows"])
def _quantize_rows(
    x, values, scales, x_stride, width, scale_rows,
    GATED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gated: `x` has the gates of `width` columns, then the gated values."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    mask = columns < width
    value = tl.load(x + row * x_stride + columns, mask, other=0.0)
    if GATED:
        up = tl.load(x + row * x_stride + width + columns, mask, other=0.0)
        value = silu_times_up(value, up, value.dtype)
    store_fp8(value, values, scales, row, first, width, scale_rows, COLUMNS, BLOCK, LARGEST, SMALLEST)


@triton.jit(do_not_specialize=["scale_rows"])
def _add_rms_norm_fp8(
    x, residual, weight, values, scales, part_stride, x_stride, width, scale_rows, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROUND_LAST: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `norm_triton._add_rms_norm`, with the norm in FP8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < width
    stored_gain = tl.load(weight + columns, mask, other=0.0)
    gain = stored_gain.to(tl.float32)
    if UNIT_OFFSET:
        gain += 1.0
    start_next(PDL)
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + columns, mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * part_stride + row * x_stride + columns, mask, other=0.0)
    value = value.to(stored_gain.dtype)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row * width + columns, mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(residual + row * width + columns, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale
    if not ROUND_LAST:
        normed = normed.to(value.dtype).to(tl.float32)
    normed = (normed * gain).to(value.dtype)
    store_fp8(normed, values, scales, row, 0, width, scale_rows, COLUMNS, BLOCK, LARGEST, SMALLEST)


def quantize_rows_cuda(x: torch.Tensor, *, per_row: bool = False) -> Fp8Rows:
    """[T, K] to FP8; rows of `x` need not be contiguous."""
    return _quantize(x, x.shape[1], gated=False, per_row=per_row)


def silu_and_mul_fp8(gate_up: torch.Tensor, *, per_row: bool = False) -> Fp8Rows:
    """SiLU(gate) × up of [T, 2 n] in FP8 [T, n]."""
    return _quantize(gate_up, gate_up.shape[1] // 2, gated=True, per_row=per_row)


def _quantize(x: torch.Tensor, width: int, *, gated: bool, per_row: bool) -> Fp8Rows:
    assert x.stride(-1) == 1 and width % BLOCK == 0
    out = new_fp8_rows(len(x), width, x.device, per_row=per_row)
    if len(x):
        columns = triton.next_power_of_2(width) if per_row else _COLUMNS
        _quantize_rows[(len(x), triton.cdiv(width, columns))](
            x, out.values, out.scales, x.stride(0), width, out.scales.shape[1], GATED=gated, COLUMNS=columns,
            BLOCK=columns if per_row else BLOCK, LARGEST=E4M3_MAX, SMALLEST=SMALLEST,
            num_warps=min(max(columns // 512, 4), 16), **dependent_launch(x.device),
        )  # fmt: skip
    return out


def rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    per_row: bool = False,
    unit_offset: bool = False,
    round_last: bool = False,
) -> Fp8Rows:
    """As `norm_triton.rms_norm_cuda`, in FP8 [T, h]."""
    count, width = x.shape[-2:]
    parts = len(x) if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = new_fp8_rows(count, width, x.device, per_row=per_row)
    if count:
        columns = triton.next_power_of_2(width)
        _add_rms_norm_fp8[(count,)](
            x, x if residual is None else residual, weight, out.values, out.scales, x.stride(0), x.stride(-2), width,
            out.scales.shape[1], eps, PARTS=parts, ADD=residual is not None, UNIT_OFFSET=unit_offset,
            ROUND_LAST=round_last, COLUMNS=columns, BLOCK=columns if per_row else BLOCK, LARGEST=E4M3_MAX,
            SMALLEST=SMALLEST, num_warps=min(max(columns // 512, 1), 16), **dependent_launch(x.device),
        )  # fmt: skip
    return out
