from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernels.attention.rotation import Rotation, rotate
from minisgl.kernels.pointwise.norm import add_rms_norm, rms_norm
from minisgl.layers.activation import ACTIVATIONS
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import Rotary, inverse_frequencies
from minisgl.layers.weights.parameters import Parameters

CPU = torch.device("cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_rms_norm_in_double_precision(generator: torch.Generator) -> None:
    x = torch.randn(5, 3, 16, generator=generator)
    weight = torch.rand(16, generator=generator)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=1e-6)


def test_add_rms_norm_returns_the_new_residual(generator: torch.Generator) -> None:
    x, residual = torch.randn(2, 4, 8, generator=generator)
    before = residual.clone()
    normed, stream = add_rms_norm(x, residual, torch.ones(8), 1e-6)
    assert torch.equal(stream, x + before)
    assert torch.equal(residual, before)
    assert torch.equal(normed, rms_norm(stream, torch.ones(8), 1e-6))


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_gated_activations(name: str, activation: torch.nn.Module, generator: torch.Generator) -> None:
    gate, up = torch.randn(2, 7, 6, generator=generator)
    out = ACTIVATIONS[name](torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(out, activation(gate) * up)


def test_scores_depend_only_on_distance(generator: torch.Generator) -> None:
    q, k = torch.randn(2, 1, 1, 32, generator=generator)
    rotary = Rotary(RopeConfig(), 32, 600, CPU)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        at = rotary.at(torch.tensor([query_at, key_at]))
        return (rotate(q, at[:1]) * rotate(k, at[1:])).sum()

    torch.testing.assert_close(score(17, 5), score(517, 505), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(300, 300), (q * k).sum(), rtol=1e-4, atol=1e-4)


def test_rotation_equals_complex_multiplication(generator: torch.Generator) -> None:
    x = torch.randn(6, 2, 16, generator=generator)
    positions = torch.tensor([0, 1, 5, 5, 99, 3], dtype=torch.int32)
    angles = positions.double()[:, None] * inverse_frequencies(RopeConfig(), 16).double()
    pairs = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.exp(1j * angles)[:, None]
    rotated = rotate(x, Rotary(RopeConfig(), 16, 100, CPU).at(positions))
    torch.testing.assert_close(rotated.double(), torch.cat((pairs.real, pairs.imag), -1), rtol=1e-5, atol=1e-5)


def test_context_extensions_stretch_long_wavelengths_only() -> None:
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    for kind in ("llama3", "yarn"):
        rope = RopeConfig(kind=kind, theta=500000.0, factor=8.0, original_max_position=8192)
        stretched = inverse_frequencies(rope, 128)
        assert torch.equal(stretched[:8], plain[:8])
        torch.testing.assert_close(stretched[-8:], plain[-8:] / 8)
        ratio = plain / stretched
        assert (ratio.diff() >= -1e-5).all()
    linear = inverse_frequencies(RopeConfig(kind="linear", theta=500000.0, factor=8.0), 128)
    torch.testing.assert_close(linear, plain / 8)


def test_attention_factor_scales_both_tables() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position=512, attention_factor=1.1)
    row = Rotary(rope, 8, 10, CPU).at(torch.tensor([3]))
    torch.testing.assert_close(row[0, :4].square() + row[0, 4:].square(), torch.full((4,), 1.21))


def test_heads_are_normalized_before_they_are_rotated(generator: torch.Generator) -> None:
    q, k = torch.randn(3, 4, 8, generator=generator), torch.randn(3, 2, 8, generator=generator)
    at = Rotary(RopeConfig(), 8, 10, CPU).at(torch.tensor([0, 4, 9]))
    q_weight, k_weight = torch.rand(2, 8, generator=generator) + 0.5
    q_out, k_out = Rotation(at, q_weight, k_weight, 1e-6).apply(q, k)
    torch.testing.assert_close(q_out, rotate(rms_norm(q, q_weight, 1e-6), at))
    torch.testing.assert_close(k_out, rotate(rms_norm(k, k_weight, 1e-6), at))
    q_out, _ = Rotation(at).apply(q, k)
    torch.testing.assert_close(q_out, rotate(q, at))


def test_large_positions_are_exact() -> None:
    at = Rotary(RopeConfig(theta=1e6), 64, 40000, CPU).at(torch.tensor([39999]))
    assert at[0, 0].item() == pytest.approx(math.cos(39999), abs=1e-4)


def test_parameters_count_their_bytes() -> None:
    parameters = Parameters(torch.bfloat16, CPU)
    parameters.replicated("a", 3, 4)
    parameters.new(5)
    assert parameters.num_bytes == 2 * (12 + 5)
