"""The fused pointwise kernels against the same layers on a CPU: in bfloat16, and float64 as the judge."""

from __future__ import annotations

import pytest
import torch

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.norm import add_rms_norm
from minisgl.layers.rotary import qk_norm_rope

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
@pytest.mark.parametrize(("count", "width"), [(1, 3072), (300, 17), (5, 17_408)])
def test_silu_and_mul(count: int, width: int, dtype: torch.dtype) -> None:
    gate_up = _random(count, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    _close(silu_and_mul(gate_up.cuda()), gate * torch.sigmoid(gate) * up, silu_and_mul(gate_up))


@DTYPES
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim"), [(16, 8, 128), (5, 1, 64), (4, 2, 80), (40, 8, 128)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("count", [1, 130])
def test_qk_norm_rope(count: int, q_heads: int, k_heads: int, head_dim: int, norm: bool, dtype: torch.dtype) -> None:
    # Heads of queries, keys and values lie in one row, as the fused projection leaves them.
    qkv = _random(count, q_heads + 2 * k_heads, head_dim, dtype=dtype)
    q, k, _ = qkv.split([q_heads, k_heads, k_heads], dim=1)
    q_weight = 1 + _random(head_dim, dtype=dtype) / 5 if norm else None
    k_weight = 1 - _random(head_dim, dtype=dtype) / 5 if norm else None
    angles = torch.outer(torch.arange(count) * 7.0, torch.linspace(1, 0.001, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    wide = [None if w is None else w.double() for w in (q_weight, k_weight)]
    exact = qk_norm_rope(q.double(), k.double(), cos_sin.double(), *wide, 1e-6)
    theirs = qk_norm_rope(q, k, cos_sin, q_weight, k_weight, 1e-6)
    cuda_q, cuda_k, _ = qkv.cuda().split([q_heads, k_heads, k_heads], dim=1)
    weights = [None if w is None else w.cuda() for w in (q_weight, k_weight)]
    ours = qk_norm_rope(cuda_q, cuda_k, cos_sin.cuda(), *weights, 1e-6)
    for our, true, their in zip(ours, exact, theirs, strict=True):
        _close(our, true, their)
