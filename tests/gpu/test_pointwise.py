"""The fused pointwise kernels against the same layers on a CPU: in bfloat16, and float64 as the judge."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.pointwise.norm import add_layer_norm, add_rms_norm
from minisgl.layers.activation import FeedForwardActivation, gelu_tanh_and_mul, silu_and_mul

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _close(ours: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor) -> None:
    """Not farther from the exact result than the CPU's own rounding, but for a little."""
    assert ours.isfinite().all()
    error, allowed = (ours.cpu().double() - exact).norm(), (theirs.double() - exact).norm()
    assert error <= 1.1 * allowed + 1e-6 * exact.norm()


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 1024), (3, 100), (257, 5120), (64, 128)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(count: int, width: int, with_residual: bool, dtype: torch.dtype) -> None:
    x, weight = _random(count, width, dtype=dtype), 1 + _random(width, dtype=dtype) / 10
    residual = _random(count, width, dtype=dtype) * 3 if with_residual else None
    exact = (x if residual is None else residual + x).double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    theirs, their_sum = add_rms_norm(x, residual, weight, 1e-6)
    ours, our_sum = add_rms_norm(x.cuda(), None if residual is None else residual.cuda(), weight.cuda(), 1e-6)
    assert torch.equal(our_sum.cpu(), their_sum)
    _close(ours, exact, theirs)


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 1024), (3, 100), (257, 4096), (64, 384)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_layer_norm(count: int, width: int, with_residual: bool, with_bias: bool, dtype: torch.dtype) -> None:
    x, gain = _random(count, width, dtype=dtype) + 1, 1 + _random(width, dtype=dtype) / 10
    residual = _random(count, width, dtype=dtype) * 3 if with_residual else None
    bias = _random(width, dtype=dtype) if with_bias else None
    exact = (x if residual is None else residual + x).double()
    exact = torch.nn.functional.layer_norm(exact, (width,), gain.double(), None if bias is None else bias.double())
    theirs, their_sum = add_layer_norm(x.clone(), residual, gain, bias, 1e-5)
    stream, shift = (None if part is None else part.cuda() for part in (residual, bias))
    ours, our_sum = add_layer_norm(x.cuda(), stream, gain.cuda(), shift, 1e-5)
    assert torch.equal(our_sum.cpu(), their_sum)
    _close(ours, exact, theirs)


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 3072), (300, 17), (5, 17_408)])
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
def test_gated_activations(activation: FeedForwardActivation, count: int, width: int, dtype: torch.dtype) -> None:
    gate_up = _random(count, 2 * width, dtype=dtype) * 4
    _close(activation(gate_up.cuda()), activation(gate_up.double()), activation(gate_up))
