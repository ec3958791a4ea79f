"""SiLU(gate) * up, GELU(gate) * up and relu(up)² on CUDA, in one pass."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


@triton.jit
def silu_times_up(gate, up, dtype: tl.constexpr):
    """SiLU(gate) * up, rounded to `dtype` where separate operations would round."""
    wide = gate.to(dtype).to(tl.float32)
    return ((wide * tl.sigmoid(wide)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def gelu_tanh_times_up(gate, up, dtype: tl.constexpr):
    """The same of GELU, by tanh: 1 + tanh(y) is 2 sigmoid(2 y)."""
    wide = gate.to(dtype).to(tl.float32)
    # 2 (2 / pi)^0.5
    inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    return ((wide * tl.sigmoid(inner)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def relu_squared(up, dtype: tl.constexpr):
    """relu(up)², rounded to `dtype` where separate operations would round."""
    wide = tl.maximum(up.to(dtype).to(tl.float32), 0.0)
    return (wide * wide).to(dtype)


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask)
    value = gelu_tanh_times_up(gate, up, gate.dtype) if GELU else silu_times_up(gate, up, gate.dtype)
    tl.store(out + row * width + columns, value, mask)


def silu_and_mul_cuda(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """[T, 2 n], contiguous, to [T, n]. `gelu`: by GELU with tanh in place of SiLU."""
    assert gate_up.is_contiguous()
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if count:
        _silu_and_mul[(count, triton.cdiv(width, 1024))](
            gate_up, out, width, BLOCK=1024, GELU=gelu, num_warps=4, **dependent_launch(gate_up.device)
        )
    return out


@triton.jit
def _relu_squared(x, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + columns
    value = tl.load(x + at, columns < width)
    tl.store(out + at, relu_squared(value, value.dtype), columns < width)


def relu_squared_cuda(x: torch.Tensor) -> torch.Tensor:
    """[T, n], contiguous, to [T, n]."""
    assert x.is_contiguous()
    count, width = x.shape
    out = torch.empty_like(x)
    if count:
        _relu_squared[(count, triton.cdiv(width, 1024))](
            x, out, width, BLOCK=1024, num_warps=4, **dependent_launch(x.device)
        )
    return out
