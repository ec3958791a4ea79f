"""Kernels that gpt-oss needs: attention with sinks, and experts in MXFP4, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.attention.select import select_backends
from minisgl.kernels.experts import gemv_gluon
from minisgl.kernels.linear.fp4_dequantize_triton import dequantize_fp4_cuda
from minisgl.kernels.linear.fp4_packed import dequantize_fp4
from minisgl.layers.activation import ClampedGate
from minisgl.layers.weights.allocate import ExpertBiases
from minisgl.layers.weights.formats import Mxfp4Blocks
from minisgl.layers.weights.mxfp4 import Mxfp4Weight
from minisgl.layers.weights.weight import Draw
from minisgl.moe.experts import run_experts
from minisgl.moe.mixture import mixture_of_experts
from minisgl.moe.routing import route
from support.kernels.decode_kernels import assert_close, check_normed_linear, poisoned_outputs
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.experts import by_plain_torch
from support.numerics.family_checkpoints import store_experts_in_mxfp4, write_family_checkpoint
from support.numerics.ranks import all_logits, load

HIDDEN, EXPERTS, TOP_K = 2880, 6, 4
GATE = ClampedGate(alpha=1.702, limit=7.0)

SEQUENCES = {
    "few rows": Sequences(decode=(1, 130, 700)),
    "many rows": Sequences(decode=(1, 2, 63, 64, 65, 700, 1500, 17, 128, 129, 400, 3)),
    "fresh prompts": Sequences(segments=((0, 1), (0, 300), (0, 64), (0, 129))),
    "short prompts": Sequences(segments=((0, 1), (0, 100), (0, 64))),
    "continued prompts": Sequences(segments=((64, 200), (0, 33), (700, 5), (128, 128))),
    "both": Sequences(decode=(5, 900, 64), segments=((0, 65), (192, 100))),
}


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_with_sinks(name: str, window: int | None) -> None:
    shape = attention_shape(
        query_heads=16, kv_heads=2, head_dim=64, page_size=64, longest=2048, dtype=torch.bfloat16, device="cuda",
        window=window, sinks=True,
    )  # fmt: skip
    case = DenseCase(shape, SEQUENCES[name])
    result, expected = case.run(*select_backends("auto", shape)).double().cpu(), case.expected()
    assert result.isfinite().all()
    assert float((result - expected).norm() / expected.norm()) < 1e-2
    torch.testing.assert_close(result, expected, atol=3e-2, rtol=3e-2)


class Case:
    """Experts of a rank with random codes and exponents."""

    def __init__(self, width: int, tokens: int) -> None:
        padded = -(-width // 64) * 64
        generator = torch.Generator("cuda").manual_seed(tokens)

        def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        self.gate_up = Mxfp4Weight.new(new, Mxfp4Blocks(), EXPERTS, 2 * padded, HIDDEN)
        self.down = Mxfp4Weight.new(new, Mxfp4Blocks(), EXPERTS, HIDDEN, width)
        for weight, inputs in ((self.gate_up, HIDDEN), (self.down, width)):
            for expert in range(EXPERTS):
                weight.part(expert).fill_random(Draw(inputs, lambda: torch.empty(0), lambda: generator))
            weight.scales.sub_(torch.randint(0, 3, weight.scales.shape, device="cuda", dtype=torch.uint8))
        outputs = 2 * padded, HIDDEN
        self.biases = ExpertBiases(
            *(torch.randn(EXPERTS, each, device="cuda", generator=generator).bfloat16() for each in outputs)
        )
        # Rows of padding are zeros in a model.
        words = self.gate_up.values.unflatten(1, (2, -1))
        if padded != width:
            last = words[:, :, -1].view(EXPERTS, 2, -1, 8, 128)
            last[:, :, :, (width % 64) // 8 :] = 0
            self.biases.gate_up.unflatten(1, (2, -1))[:, :, width:] = 0
        self.x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
        self.logits = torch.randn(tokens, EXPERTS, device="cuda", generator=generator).bfloat16()
        self.shares, self.chosen = route(self.logits, TOP_K, renormalize=True)
        self._width = width

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        gate_up, down = (
            dequantize_fp4(each.values.flatten(0, 1), each.scales.flatten(0, 1))[:, : each.in_features].view(each.shape)
            for each in (self.gate_up, self.down)
        )
        of = self.x, self.shares, self.chosen, gate_up, down
        return by_plain_torch(dtype, *of, activation=GATE, biases=self.biases)


@pytest.mark.parametrize("width", [2880, 1440, 736])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 20, 64, 300, 2048, 2100])
def test_experts_in_mxfp4(width: int, tokens: int) -> None:
    case = Case(width, tokens)
    assert gemv_gluon.fits(case.x, case.down.values, TOP_K, padded=True) is (tokens <= gemv_gluon.MAX_TOKENS)
    exact, plain = case.expected(torch.double), case.expected(torch.bfloat16)
    with poisoned_outputs():
        ours = mixture_of_experts(
            case.x, case.logits, case.gate_up, case.down, GATE, TOP_K, renormalize=True, biases=case.biases
        )
        also = run_experts(case.x, case.shares, case.chosen, case.gate_up, case.down, GATE, case.biases)
    assert_close(ours, exact, plain)
    assert_close(also, exact, plain)


def test_weights_in_mxfp4_are_dequantized_bitwise() -> None:
    case = Case(1440, 1)
    for weight in (case.gate_up, case.down):
        words, scales = weight.values.flatten(0, 1), weight.scales.flatten(0, 1)
        expected = dequantize_fp4(words, scales)[:, : weight.in_features].bfloat16()
        assert torch.equal(dequantize_fp4_cuda(words, scales, weight.in_features), expected)


def test_a_step_with_experts_in_mxfp4_can_be_captured() -> None:
    case = Case(2880, 2)

    def run() -> torch.Tensor:
        return mixture_of_experts(
            case.x, case.logits, case.gate_up, case.down, GATE, TOP_K, renormalize=True, biases=case.biases
        )

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("outputs", [5120, 32])
def test_norms_that_round_last_are_fused_with_a_product(outputs: int) -> None:
    check_normed_linear(
        torch.device("cuda"), inputs=HIDDEN, outputs=outputs, gated=False, with_residual=True, dtype=torch.bfloat16,
        with_bias=True, round_last=True,
    )  # fmt: skip


def test_a_model_in_mxfp4_matches_a_cpu(tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(tmp_path, "gpt-oss", hidden_size=192, intermediate_size=160, head_dim=64)
    store_experts_in_mxfp4(checkpoint)
    model = load(checkpoint, dtype=torch.bfloat16, device="cuda")
    assert model.parameters.weights_by_type["mxfp4"] > 0 and not model.parameters.num_dequantized
    for sequences in ([[7]], [[3 + i * 7 % 290 for i in range(60)], [5, 6, 7]]):
        expected = all_logits(load(checkpoint), sequences)
        errors = (all_logits(model, sequences).float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
        # Rounding may select another expert for some tokens.
        assert errors.median() < 0.05
