"""Products of a few rows against float64."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.linear.dense_skinny_triton import MAX_ROWS, fits
from minisgl.layers.weights.dense import DenseWeight


@pytest.mark.parametrize(
    ("dtype", "with_bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (1024, 4096),
        (3072, 1024),
        (1024, 6145),
        (5120, 17),
        (2048, 128),
        (17_408, 5120),
        (896, 1152),
        (4864, 896),
        (3584, 4608),
        (18_944, 3584),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, MAX_ROWS, MAX_ROWS + 1, 33, 200])
def test_linear(rows: int, with_bias: bool, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, generator=draw, device="cuda").to(dtype)
    weight = (torch.randn(outputs, inputs, generator=draw, device="cuda") / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=draw, device="cuda").to(dtype) * 2 if with_bias else None
    assert fits(x, weight) is (rows <= MAX_ROWS)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    ours = DenseWeight(weight).product(x, bias)
    assert ours.shape == exact.shape
    assert float((ours.double() - exact).norm() / exact.norm()) < (3e-3 if dtype is torch.bfloat16 else 4e-4)


def test_unsupported_shapes_use_the_fallback() -> None:
    weight = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 1000, device="cuda", dtype=torch.bfloat16)
    assert not fits(x, weight)
    plain = DenseWeight(weight).product(x)
    assert plain.shape == (2, 64)
    bias = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(DenseWeight(weight).product(x, bias), plain + bias, atol=0.5, rtol=2e-2)
