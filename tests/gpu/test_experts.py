"""Mixture of experts against float64, for the tokens of a decode step and of a prompt."""

from __future__ import annotations

import pytest
import torch

import support.kernels.experts
from minisgl.kernels.experts import gemv_gluon, skinny_gluon
from minisgl.kernels.experts.grouped_gemm_triton import MAX_TOKENS, fits
from minisgl.kernels.launch import dependent_launch_triton
from minisgl.kernels.linear.dequantize_triton import dequantize_blocks
from minisgl.layers.activation import (
    FeedForwardActivation,
    gelu_and_mul,
    gelu_tanh_and_mul,
    relu_squared,
    silu_and_mul,
)
from minisgl.layers.norm import RMSNorm
from minisgl.layers.norm_config import NormConfig
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.inputs import PreNorm
from minisgl.layers.weights.weight import QuantizedWeight, Weight
from minisgl.moe.experts import experts_one_by_one, run_experts
from minisgl.moe.mixture import mixture_of_experts as mixture
from minisgl.moe.routing import route, route_by_scores
from support.kernels.decode_kernels import assert_close, poisoned_outputs
from support.kernels.experts import Sizes, by_plain_torch, exact_int4, in_fp8, in_int4
from support.kernels.interpreted_routing import CASES as ROUTINGS
from support.kernels.interpreted_routing import draw as draw_scores
from support.kernels.sizes import sized

QWEN3_30B = Sizes(2048, 768, 128, 8)
SIZES = {
    "two ranks of 30B-A3B": Sizes(2048, 384, 16, 8),
    "eight ranks of 30B-A3B": Sizes(2048, 96, 16, 8),
    "eight ranks of 235B-A22B": Sizes(4096, 192, 16, 8),
    "few experts": Sizes(256, 128, 6, 2),
}
FEW, CROWDED = SIZES["few experts"], Sizes(2048, 768, 16, 8)


def draw(sizes: Sizes, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return support.kernels.experts.draw(sizes, tokens, dtype, "cuda")


def choices(sizes: Sizes, tokens: int) -> torch.Tensor:
    return support.kernels.experts.choices(sizes, tokens).cuda()


def check(ours: torch.Tensor, *of: torch.Tensor) -> None:
    """Not farther from float64 than plain torch in the same dtype: `of` these, as `by_plain_torch` takes them."""
    assert ours.dtype == of[0].dtype
    assert_close(ours, by_plain_torch(torch.double, *of), by_plain_torch(ours.dtype, *of))


@pytest.mark.parametrize("tokens", [1, 9, 129, 300, MAX_TOKENS, MAX_TOKENS + 50])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((sizes, torch.bfloat16) for sizes in SIZES.values()), (FEW, torch.float16)], ids=str
)
def test_experts(sizes: Sizes, tokens: int, dtype: torch.dtype) -> None:
    x, gate_up, down = draw(sizes, tokens, dtype)
    experts = choices(sizes, tokens)
    shares = torch.rand(experts.shape, device="cuda").to(dtype)
    assert fits(x, down) is (tokens <= MAX_TOKENS or dtype is torch.float16)
    ours = run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), silu_and_mul)
    check(ours, x, shares, experts, gate_up, down)


def test_experts_of_30b_a3b() -> None:
    x, gate_up, down = draw(QWEN3_30B, 64, torch.bfloat16)
    experts = choices(QWEN3_30B, 64)
    shares = torch.rand(experts.shape, device="cuda").bfloat16()
    check(
        run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), silu_and_mul),
        x,
        shares,
        experts,
        gate_up,
        down,
    )


@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_all_tokens_may_select_the_same_experts(tokens: int) -> None:
    x, gate_up, down = draw(CROWDED, tokens, torch.bfloat16)
    experts = torch.tensor([[15, 3, 9, 0, 5, 14, 1, 2]], dtype=torch.int32, device="cuda").repeat(tokens, 1)
    shares = torch.full(experts.shape, 0.125, device="cuda", dtype=torch.bfloat16)
    ours = run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), silu_and_mul)
    check(ours, x, shares, experts, gate_up, down)


def test_the_result_of_a_token_does_not_depend_on_other_tokens() -> None:
    x, gate_up, down = draw(QWEN3_30B, 200, torch.bfloat16)
    experts = choices(QWEN3_30B, 200)
    shares = torch.rand(experts.shape, device="cuda").bfloat16()
    many = run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), silu_and_mul)
    backwards = run_experts(
        x.flip(0), shares.flip(0), experts.flip(0), DenseWeight(gate_up), DenseWeight(down), silu_and_mul
    )
    torch.testing.assert_close(backwards.flip(0), many, rtol=0, atol=0)
    one = run_experts(x[7:8], shares[7:8], experts[7:8], DenseWeight(gate_up), DenseWeight(down), silu_and_mul)
    torch.testing.assert_close(one, many[7:8], rtol=2e-2, atol=2e-2)


def test_other_activations_use_the_fallback() -> None:
    x, gate_up, down = draw(FEW, 5, torch.bfloat16)
    experts = choices(FEW, 5)
    shares = torch.rand(experts.shape, device="cuda").bfloat16()
    wide = [tensor.double() for tensor in (x, gate_up, down)]
    expected = experts_one_by_one(wide[0], experts, wide[1], wide[2], gelu_and_mul) * shares.double().unsqueeze(-1)
    ours = run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), gelu_and_mul)
    assert float((ours.double() - expected.sum(1)).norm() / expected.sum(1).norm()) < 8e-3


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens", range(1, gemv_gluon.MAX_TOKENS + 1))
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((sizes, torch.bfloat16) for sizes in SIZES.values()), (FEW, torch.float16)], ids=str
)
def test_selection_and_experts_in_one_launch(sizes: Sizes, tokens: int, renormalize: bool, dtype: torch.dtype) -> None:
    x, gate_up, down = draw(sizes, tokens, dtype)
    logits = torch.randn(tokens, sizes.experts, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    # Some of them are equal.
    logits = (2 * logits).round(decimals=1).to(dtype)
    shares, experts = route(logits, sizes.top_k, renormalize=renormalize)
    assert gemv_gluon.fits(x, down, sizes.top_k)
    ours = mixture(
        x, logits, DenseWeight(gate_up), DenseWeight(down), silu_and_mul, sizes.top_k, renormalize=renormalize
    )
    check(ours, x, shares, experts, gate_up, down)


@pytest.mark.parametrize("tokens", [1, 3, 9, 60, 300, MAX_TOKENS + 50])
@pytest.mark.parametrize(
    ("sizes", "activation"),
    [
        (Sizes(2688, 1856, 16, 6), relu_squared),
        (FEW, relu_squared),
        (Sizes(2816, 704, 16, 8), gelu_tanh_and_mul),
        (QWEN3_30B._replace(experts=16), silu_and_mul),
    ],
    ids=["Nemotron 3 Nano", "few without gates", "Gemma 4", "SiLU"],
)
def test_given_experts_with_other_gates(sizes: Sizes, activation: FeedForwardActivation, tokens: int) -> None:
    """With weights in float32, as of routers with sigmoids."""
    x, gate_up, down = draw(sizes, tokens, torch.bfloat16)
    if activation is relu_squared:
        gate_up = gate_up[:, : sizes.width].contiguous()
    experts = choices(sizes, tokens)
    shares = 2.5 * torch.rand(experts.shape, device="cuda")
    ours = run_experts(x, shares, experts, DenseWeight(gate_up), DenseWeight(down), activation)
    exact, plain = (
        by_plain_torch(dtype, x, shares, experts, gate_up, down, activation=activation)
        for dtype in (torch.double, torch.bfloat16)
    )
    assert_close(ours, exact, plain)


@pytest.mark.parametrize("weights", ["FP8", "INT4"])
@pytest.mark.parametrize("tokens", range(1, gemv_gluon.MAX_TOKENS + 1))
def test_given_experts_with_quantized_weights(tokens: int, weights: str) -> None:
    x, *both = draw(QWEN3_30B._replace(experts=16), tokens, torch.bfloat16)
    stored, dense = stored_as(weights, *both)
    experts = choices(QWEN3_30B._replace(experts=16), tokens)
    shares = torch.rand(experts.shape, device="cuda")
    ours = run_experts(x, shares, experts, *stored, silu_and_mul)
    check(ours, x, shares, experts, *dense)


@pytest.mark.parametrize("renormalize", [False, True])
def test_selection_and_experts_of_30b_a3b_in_one_launch(renormalize: bool) -> None:
    x, gate_up, down = draw(QWEN3_30B, 1, torch.bfloat16)
    logits = torch.randn(1, 128, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    shares, experts = route(logits, 8, renormalize=renormalize)
    assert gemv_gluon.fits(x, down, 8)
    ours = mixture(x, logits, DenseWeight(gate_up), DenseWeight(down), silu_and_mul, 8, renormalize=renormalize)
    check(ours, x, shares, experts, gate_up, down)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), float("-inf")])
def test_any_logits_work_in_selection_and_experts(value: float) -> None:
    x, gate_up, down = draw(FEW._replace(experts=128), 1, torch.bfloat16)
    logits = torch.full((1, 128), value, device="cuda", dtype=torch.bfloat16)
    out = mixture(x, logits, DenseWeight(gate_up), DenseWeight(down), silu_and_mul, 8, renormalize=True)
    torch.cuda.synchronize()
    assert bool(out.isfinite().all()) is (value == 0)


FP8_SIZES = {
    "30B-A3B": QWEN3_30B._replace(experts=32),
    "two ranks of 30B-A3B": SIZES["two ranks of 30B-A3B"],
    "few experts": FEW,
}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens", sized([1, 2, 3, 4, 9, 60, 129, 300, MAX_TOKENS + 50], [1, 3, 4, 60, 129]))
@pytest.mark.parametrize("name", sized([*FP8_SIZES], ["few experts"]))
def test_experts_in_fp8(name: str, tokens: int, renormalize: bool) -> None:
    sizes = FP8_SIZES[name]
    x, gate_up, down = draw(sizes, tokens, torch.bfloat16)
    stored = in_fp8(gate_up), in_fp8(down)
    logits = torch.randn(tokens, sizes.experts, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    logits = logits.bfloat16()
    shares, experts = route(logits, sizes.top_k, renormalize=renormalize)
    assert gemv_gluon.fits(x, stored[1].values, sizes.top_k) is (tokens <= 3)
    with poisoned_outputs():
        ours = mixture(x, logits, *stored, silu_and_mul, sizes.top_k, renormalize=renormalize)
    dense = [each.dequantized(torch.float32) for each in stored]
    expected = by_plain_torch(torch.double, x, shares, experts, *dense)
    # Plain torch rounds the weights too.
    assert_close(ours, expected, by_plain_torch(torch.bfloat16, x, shares, experts, *dense))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", sized([1, 2, 3, 4, 9, 60, 129, 300, MAX_TOKENS + 50], [1, 3, 60]))
@pytest.mark.parametrize("name", sized([*FP8_SIZES], ["few experts"]))
def test_experts_in_int4(name: str, tokens: int, group_size: int, renormalize: bool) -> None:
    sizes = FP8_SIZES[name]
    x, gate_up, down = draw(sizes, tokens, torch.bfloat16)
    stored = in_int4(gate_up, group_size), in_int4(down, group_size)
    logits = torch.randn(tokens, sizes.experts, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    logits = logits.bfloat16()
    shares, experts = route(logits, sizes.top_k, renormalize=renormalize)
    assert gemv_gluon.fits(x, stored[1].values, sizes.top_k) is (tokens <= 3)
    with poisoned_outputs():
        ours = mixture(x, logits, *stored, silu_and_mul, sizes.top_k, renormalize=renormalize)
    dense = [exact_int4(each) for each in stored]
    expected = by_plain_torch(torch.double, x, shares, experts, *dense)
    # Plain torch rounds the weights too.
    assert_close(ours, expected, by_plain_torch(torch.bfloat16, x, shares, experts, *dense))


def stored_as(
    weights: str, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[tuple[QuantizedWeight, QuantizedWeight], tuple[torch.Tensor, torch.Tensor]]:
    """Weights in FP8 or INT4, and what they are in float32."""
    if weights == "FP8":
        blocks = in_fp8(gate_up), in_fp8(down)
        return blocks, (blocks[0].dequantized(torch.float32), blocks[1].dequantized(torch.float32))
    words = in_int4(gate_up, 128), in_int4(down, 128)
    return words, (exact_int4(words[0]), exact_int4(words[1]))


@pytest.mark.parametrize("tokens", [5, 20, 31])
@pytest.mark.parametrize("weights", ["FP8", "INT4"])
def test_all_tokens_may_select_the_same_quantized_experts(weights: str, tokens: int) -> None:
    """Each of them then has more tokens than a program takes at once."""
    x, gate_up, down = draw(CROWDED, tokens, torch.bfloat16)
    stored, dense = stored_as(weights, gate_up, down)
    chosen = torch.tensor([[15, 3, 9, 0, 5, 14, 1, 2]], dtype=torch.int32, device="cuda").repeat(tokens, 1)
    shares = torch.full(chosen.shape, 0.125, device="cuda", dtype=torch.bfloat16)
    assert skinny_gluon.fits(x, stored[1].values, CROWDED.top_k)
    with poisoned_outputs():
        ours = run_experts(x, shares, chosen, *stored, silu_and_mul)
    expected = by_plain_torch(torch.double, x, shares, chosen, *dense)
    assert_close(ours, expected, by_plain_torch(torch.bfloat16, x, shares, chosen, *dense))


@pytest.mark.parametrize("weights", ["FP8", "INT4"])
def test_the_result_of_a_token_in_quantized_experts_does_not_depend_on_other_tokens(weights: str) -> None:
    x, gate_up, down = draw(QWEN3_30B, 90, torch.bfloat16)
    stored, _ = stored_as(weights, gate_up, down)
    chosen = choices(QWEN3_30B, 90)
    shares = torch.rand(chosen.shape, device="cuda").bfloat16()
    many = run_experts(x, shares, chosen, *stored, silu_and_mul)
    backwards = run_experts(x.flip(0), shares.flip(0), chosen.flip(0), *stored, silu_and_mul)
    torch.testing.assert_close(backwards.flip(0), many, rtol=0, atol=0)
    few = run_experts(x[7:12], shares[7:12], chosen[7:12], *stored, silu_and_mul)
    torch.testing.assert_close(few, many[7:12], rtol=0, atol=0)


def test_every_fp8_number_is_right_in_experts() -> None:
    """Each expert has weights that are all the same number, and one token, all ones."""
    # All but NaN, which no checkpoint may have.
    bits = torch.tensor([bits for bits in range(256) if bits & 0x7F != 0x7F], device="cuda", dtype=torch.uint8)
    count = len(bits)
    values = bits[:, None, None].expand(count, 256, 128).contiguous().view(torch.float8_e4m3fn)
    gate_up = Fp8Weight(values, torch.full((count, 2, 1), 1 / 128, device="cuda"))
    down = Fp8Weight(values[:, :128].contiguous(), torch.full((count, 1, 1), 1 / 128, device="cuda"))
    x = torch.ones(count, 128, device="cuda", dtype=torch.bfloat16)
    chosen = torch.arange(count, dtype=torch.int32, device="cuda")[:, None]
    shares = torch.ones(count, 1, device="cuda", dtype=torch.bfloat16)
    assert skinny_gluon.fits(x, down.values, 1)
    ours = run_experts(x, shares, chosen, gate_up, down, silu_and_mul)
    dense = gate_up.dequantized(torch.float32), down.dequantized(torch.float32)
    expected = by_plain_torch(torch.double, x, shares, chosen, *dense)
    # Numbers are 1/8 apart at most.
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=0)


def test_blocks_are_dequantized_as_on_a_cpu() -> None:
    stored = in_fp8(draw(FEW, 1, torch.bfloat16)[1])
    with poisoned_outputs():
        ours = dequantize_blocks(*stored.tensors, torch.bfloat16)
    on_cpu = Fp8Weight(*(each.cpu() for each in stored.tensors))
    assert torch.equal(ours.cpu(), on_cpu.dequantized(torch.bfloat16))


@pytest.mark.captures
@torch.inference_mode()
def test_fp8_kernels_that_start_early_read_no_data_of_an_earlier_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = QWEN3_30B._replace(experts=32)
    x, gate_up, down = draw(sizes, 1, torch.bfloat16)
    stored = in_fp8(gate_up), in_fp8(down)
    routers = [torch.randn(sizes.experts, sizes.hidden, device="cuda").bfloat16() for _ in range(4)]
    norm = RMSNorm(torch.ones(sizes.hidden, device="cuda", dtype=torch.bfloat16), NormConfig(eps=1e-6))

    def layers() -> torch.Tensor:
        y, residual = x, torch.zeros_like(x)
        for router in routers:
            y, logits, residual = DenseWeight(router).norm_and_product(PreNorm(norm, y, residual))
            y = mixture(y, logits, *stored, silu_and_mul, sizes.top_k, renormalize=True)
        return y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers()
    monkeypatch.setattr(dependent_launch_triton, "_has_dependent_launch", lambda device: False)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(captured, layers(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (6, 2), (200, 200)])
def test_routing_matches_a_cpu(num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    # No two of a row are equal: which of them is chosen is nobody's promise.
    order = torch.stack([torch.randperm(num_experts) for _ in range(301)])
    logits = ((order - num_experts / 2) / 16).to(dtype).float()
    shares, experts = route(logits, top_k, renormalize=renormalize)
    our_shares, our_experts = route(logits.cuda().to(dtype), top_k, renormalize=renormalize)
    assert our_experts.tolist() == experts.tolist()
    torch.testing.assert_close(our_shares.cpu(), shares.to(dtype))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
def test_any_logits_select_distinct_existing_experts(value: float) -> None:
    logits = torch.full((3, 100), value, device="cuda", dtype=torch.bfloat16)
    logits[1, 50:] = 1.0
    _, experts = route(logits, 8, renormalize=True)
    for row in experts.tolist():
        assert len(set(row)) == 8
        assert min(row) >= 0 and max(row) < 100


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_by_scores_matches_a_cpu(name: str) -> None:
    case = ROUTINGS[name]
    logits, bias = draw_scores(case, 301)
    shares, experts = route_by_scores(logits, bias, case.top_k, case.routing)
    ours = route_by_scores(logits.cuda(), None if bias is None else bias.cuda(), case.top_k, case.routing)
    assert ours[1].tolist() == experts.tolist()
    torch.testing.assert_close(ours[0].cpu(), shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4, 40, MAX_TOKENS + 50])
@pytest.mark.parametrize("weights", ["bf16", "FP8", "INT4"])
def test_experts_take_weights_in_float32(weights: str, tokens: int) -> None:
    x, gate_up, down = draw(FEW, tokens, torch.bfloat16)
    dense = gate_up, down
    stored: tuple[Weight, Weight] = DenseWeight(gate_up), DenseWeight(down)
    if weights != "bf16":
        stored, dense = stored_as(weights, gate_up, down)
    experts = choices(FEW, tokens)
    shares = torch.rand(experts.shape, generator=torch.Generator().manual_seed(tokens)).cuda()
    expected = by_plain_torch(torch.double, x, shares, experts, *dense)
    ours = run_experts(x, shares, experts, *stored, silu_and_mul)
    assert ours.dtype == torch.bfloat16
    assert_close(ours, expected, by_plain_torch(torch.bfloat16, x, shares, experts, *dense))


@pytest.mark.captures
@pytest.mark.parametrize(
    ("tokens", "weights"),
    [
        *((tokens, "bf16") for tokens in (1, 2, 3, 4, 40, MAX_TOKENS + 50)),
        *((tokens, weights) for tokens in (2, 40) for weights in ("FP8", "INT4")),
    ],
)
@torch.inference_mode()
def test_kernels_that_start_early_read_no_data_of_an_earlier_layer(
    tokens: int, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched one after the other in the ordinary way, the same kernels give the same."""
    sizes = QWEN3_30B
    x, dense_gate_up, dense_down = draw(sizes, tokens, torch.bfloat16)
    gate_up: Weight = DenseWeight(dense_gate_up)
    down: Weight = DenseWeight(dense_down)
    if weights != "bf16":
        gate_up, down = stored_as(weights, dense_gate_up, dense_down)[0]
    routers = [torch.randn(sizes.experts, sizes.hidden, device="cuda").bfloat16() for _ in range(4)]
    norm = RMSNorm(torch.ones(sizes.hidden, device="cuda", dtype=torch.bfloat16), NormConfig(eps=1e-6))

    def layers(x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for router in routers:
            x, logits, residual = DenseWeight(router).norm_and_product(PreNorm(norm, x, residual))
            x = mixture(x, logits, gate_up, down, silu_and_mul, sizes.top_k, renormalize=True)
        return x

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers(x)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(x)
    monkeypatch.setattr(dependent_launch_triton, "_has_dependent_launch", lambda device: False)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(captured, layers(x), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("hidden", [1024, 2048])
def test_norm_and_router(hidden: int, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x, residual, router = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16()
        for shape in ((rows, hidden), (rows, hidden), (128, hidden))
    )
    norm = RMSNorm((1 + torch.rand(hidden, generator=generator, device="cuda")).bfloat16(), NormConfig(eps=1e-6))
    normed, logits, stream = DenseWeight(router).norm_and_product(PreNorm(norm, x, residual.clone()))
    torch.testing.assert_close(stream, x + residual, rtol=0, atol=0)
    exact = torch.nn.functional.rms_norm((x + residual).double(), (hidden,), norm.gain.double(), 1e-6)
    assert float((normed.double() - exact).norm() / exact.norm()) < 5e-3
    exact = exact @ router.double().T
    assert float((logits.double() - exact).norm() / exact.norm()) < 8e-3
