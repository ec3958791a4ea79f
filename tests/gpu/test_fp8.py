"""Products with FP8 weights against float64 of the same numbers, and models against the same quantization on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.launch import dependent_launch_triton
from minisgl.kernels.linear.fp8_gemv_gluon import fits, fp8_row, normed_fp8_row
from minisgl.kernels.linear.fp8_persistent_gluon import Share, fp8_batch, multiprocessors, share
from minisgl.kernels.linear.fp8_skinny_gluon import Tile, fp8_linear, fp8_tile
from minisgl.kernels.pointwise.fp8_rows import BLOCK, E4M3_MAX, Fp8Rows, dequantize_rows
from minisgl.kernels.pointwise.norm_triton import rms_norm_cuda
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.kernels.pointwise.quantize_rows_triton import rms_norm_fp8, silu_and_mul_fp8
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.weights import load_weights
from minisgl.toy.tiny import write_tiny_checkpoint
from support.kernels.decode_kernels import draw, poisoned_outputs
from support.kernels.sizes import sized
from support.numerics.fake_quantization import fake_quantized, record_quantized_inputs
from support.numerics.ranks import all_logits, load

CUDA = torch.device("cuda")


def row_of(inputs: int) -> torch.Tensor:
    return draw(1, inputs, dtype=torch.bfloat16, device=CUDA)


def weight_of(outputs: int, inputs: int, *, per_channel: bool = False) -> Fp8Weight:
    # Torch turns what exceeds the largest number into NaN.
    wide = draw(outputs, inputs, dtype=torch.bfloat16, device=CUDA, scale=100.0).clamp(-E4M3_MAX, E4M3_MAX)
    values = wide.to(torch.float8_e4m3fn)
    blocks = (outputs, 1) if per_channel else (outputs // BLOCK, inputs // BLOCK)
    scales = draw(*blocks, dtype=torch.float32, device=CUDA).abs() * 0.01 * inputs**-0.5
    return Fp8Weight(values, scales + 1e-4)


def exact(x: Fp8Rows, weight: Fp8Weight) -> torch.Tensor:
    return dequantize_rows(x).double() @ weight.dequantized(torch.float32).double().T


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    assert ours.isfinite().all()
    assert (ours.double() - expected).norm() <= tolerance * expected.norm()


def assert_a_graph_gives_the_bits_of(step: Callable[[], torch.Tensor]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step().clone()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        captured = step()
        graph.capture_end()
        for _ in range(5):
            graph.replay()
            stream.synchronize()
            assert torch.equal(captured, expected)


@pytest.mark.parametrize(
    "tile", [Tile(16, 128, 1, 1, 5), Tile(16, 64, 1, 4, 3), Tile(32, 64, 3, 2, 3), Tile(64, 64, 2, 2, 2)]
)
@pytest.mark.parametrize("rows", sized([1, 9, 16, 31, 64, 65, 130], [9, 130]))
def test_a_product(rows: int, tile: Tile) -> None:
    x, weight = quantize_rows(draw(rows, 1408, dtype=torch.bfloat16, device=CUDA)), weight_of(768, 1408)
    with poisoned_outputs():
        ours = fp8_linear(x, weight.values, weight.scales, tile)
    assert ours.shape == ((rows, 768) if tile.splits == 1 else (tile.splits, rows, 768))
    assert_near(ours if tile.splits == 1 else ours.sum(0), exact(x, weight))


@pytest.mark.parametrize("rows", sized([16, 17, 33, 64, 65, 80, 128, 129, 192, 200, 1001], [17, 64, 65, 129]))
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    sized([(512, 128), (768, 896), (256, 17408), (17152, 1024)], [(512, 128), (768, 896), (256, 3072)]),
)
def test_a_product_of_a_batch(rows: int, outputs: int, inputs: int) -> None:
    """Also where programs share tiles: their sums have always the same bits, and the counters are zero again."""
    x = quantize_rows(draw(rows, inputs, dtype=torch.bfloat16, device=CUDA))
    weight = weight_of(outputs, inputs)
    blocks = inputs // BLOCK
    shares = [share(rows, outputs, inputs, multiprocessors(CUDA))]
    for tall in (2, 3) if rows > 64 else (1,):
        tiles = -(-rows // (64 * tall)) * (outputs // (256 if tall == 1 else 128))
        shares.append(Share(tall, tiles, 0, 1, blocks))
        if blocks > 4 and tiles < multiprocessors(CUDA):
            shares.append(Share(tall, 0, 2 * tiles, 2, -(-blocks // 8) * 4))
    for work in shares:
        with poisoned_outputs():
            ours = fp8_batch(x, weight.values, weight.scales, work)
            again = fp8_batch(x, weight.values, weight.scales, work)
        assert_near(ours, exact(x, weight))
        assert torch.equal(ours, again)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", sized([1, 3, 17, 64, 65, 77, 128, 129, 250, 1001], [3, 17, 64, 65, 129]))
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1152, 896), (768, 512), (128, 128), (896, 640), (7168, sized(5120, 2048))]
)
def test_a_product_of_any_size_and_number_of_rows(
    outputs: int, inputs: int, rows: int, bias: bool, per_channel: bool
) -> None:
    x = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA)
    weight = weight_of(outputs, inputs, per_channel=per_channel)
    shift = draw(outputs, dtype=torch.bfloat16, device=CUDA) if bias else None
    # One row stays in 16 bits.
    rounded = dequantize_rows(quantize_rows(x, per_row=per_channel)) if rows > 1 else x
    expected = rounded.double() @ weight.dequantized(torch.float32).double().T
    expected = expected if shift is None else expected + shift.double()
    with poisoned_outputs():
        ours = weight.product(x, shift)
        parts = weight.product(x, shift, in_parts=True)
    assert_near(ours, expected)
    assert_near(parts if parts.dim() == 2 else parts.sum(0), expected)


ROW_PRODUCTS = [
    (7168, 5120),
    (1152, 896),
    (128, 128),
    (768, 1408),
    (256, 8192),
    (256, 8320),
    (1280, 17408),
    (384, 32768),
]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), sized(ROW_PRODUCTS, ROW_PRODUCTS[1:5]))
def test_a_product_of_one_row(outputs: int, inputs: int, bias: bool, per_channel: bool) -> None:
    x, weight = row_of(inputs), weight_of(outputs, inputs, per_channel=per_channel)
    shift = draw(outputs, dtype=torch.bfloat16, device=CUDA) if bias else None
    expected = x.double() @ weight.dequantized(torch.float32).double().T
    expected = expected if shift is None else expected + shift.double()
    assert fits(x, weight.values)
    with poisoned_outputs():
        ours = fp8_row(x, weight.values, weight.scales, shift)
    assert_near(ours, expected)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 896), (256, 128), (1536, sized(8192, 2048)), (3328, 5120)])
def test_a_product_of_one_row_behind_its_norm(
    outputs: int, inputs: int, begins: bool, gated: bool, per_channel: bool
) -> None:
    x, weight = row_of(inputs), weight_of(outputs, inputs, per_channel=per_channel)
    residual = None if begins else row_of(inputs) * 3
    gain, shift = 1 + draw(inputs, dtype=torch.bfloat16, device=CUDA), row_of(outputs)[0]
    stream = x if residual is None else x + residual
    normed = rms_norm_cuda(stream, None, gain, 1e-6)
    expected = normed.double() @ weight.dequantized(torch.float32).double().T + shift.double()
    expected = silu_and_mul(expected) if gated else expected
    with poisoned_outputs():
        ours, ours_stream = normed_fp8_row(x, residual, gain, 1e-6, weight.values, weight.scales, shift, gated=gated)
    assert torch.equal(ours_stream, stream)
    assert_near(ours, expected, 8e-3)


def test_a_row_that_does_not_fit_is_quantized() -> None:
    x, weight = row_of(33_024), weight_of(128, 33_024)
    assert not fits(x, weight.values)
    assert_near(weight.product(x), exact(quantize_rows(x), weight))


@pytest.mark.parametrize(
    ("rows", "per_channel"),
    [*product(sized([1, 2, 64, 128, 256, 1001], [2, 128, 256]), [False]), *product(sized([1, 2, 64], [2, 64]), [True])],
)
def test_large_sums_keep_their_precision(rows: int, per_channel: bool) -> None:
    """In our kernels, which are for up to 64 rows per channel. The tensor cores alone would cut all products to 14 bits
    of the sum, which makes that of positive numbers too small by a quarter."""
    inputs = 17408
    weight = weight_of(128, inputs, per_channel=per_channel)
    positive = Fp8Weight(weight.values.float().abs().to(torch.float8_e4m3fn), weight.scales)
    x = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA).abs()
    rounded = dequantize_rows(quantize_rows(x, per_row=per_channel)) if rows > 1 else x
    expected = rounded.double() @ positive.dequantized(torch.float32).double().T
    ours = positive.product(x).double()
    assert_near(ours, expected)
    assert abs(float((ours / expected).mean()) - 1) < 1e-3


@pytest.mark.parametrize("rows", sized([1, 5, 33], [5]))
@pytest.mark.parametrize("inputs", [128, 640, 5120, 17408])
def test_activations_are_quantized_as_on_a_cpu(inputs: int, rows: int) -> None:
    x = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA, scale=3.0)
    x[0, :BLOCK] = 0
    gate_up = draw(rows, 2 * inputs, dtype=torch.bfloat16, device=CUDA)
    residual, gain = torch.randn_like(x), draw(inputs, dtype=torch.bfloat16, device=CUDA)
    stream = residual.clone()
    parts = draw(3, rows, inputs, dtype=torch.float32, device=CUDA)
    for ours, expected in (
        (quantize_rows(x), x),
        (silu_and_mul_fp8(gate_up), silu_and_mul(gate_up)),
        (rms_norm_fp8(x, residual, gain, 1e-6), rms_norm_cuda(x, stream, gain, 1e-6)),
        (rms_norm_fp8(parts, None, gain, 1e-6), rms_norm_cuda(parts, None, gain, 1e-6)),
    ):
        reference = quantize_rows(expected.cpu())
        assert torch.allclose(ours.scales[:, :rows].cpu(), reference.scales[:, :rows], rtol=1e-5)
        assert_near(dequantize_rows(ours), dequantize_rows(reference).to(CUDA).double(), 2e-3)
    assert torch.equal(residual, stream)


@pytest.mark.parametrize("kind", ["blocks", "channels", "while loading"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_close_to_those_of_the_same_quantization_in_float32(arch: str, kind: str, tmp_path: Path) -> None:
    stored = {"blocks": "fp8-block", "channels": "fp8-channel"}.get(kind)
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    checkpoint = write_tiny_checkpoint(tmp_path, arch, quantization=stored, **sizes)  # type: ignore[arg-type]
    config = ModelConfig.read(checkpoint, quantization=None if stored else "fp8")
    model = load(checkpoint, dtype=torch.bfloat16, device="cuda", config=config)
    for layer in model.layers:
        assert isinstance(layer.attention.qkv.weight, Fp8Weight) and isinstance(layer.attention.out.weight, Fp8Weight)
    sequences = [[int(token) for token in torch.randint(3, 500, (length,))] for length in (1, 7, 90, 300)]
    with record_quantized_inputs() as recorded:
        ours = all_logits(model, sequences).float().cpu()
    assert len(recorded) == 4 * len(model.layers)
    per_row = kind != "blocks"
    expected = all_logits(fake_quantized(checkpoint, config, per_row=per_row, recorded=recorded), sequences)
    unquantized = all_logits(load(checkpoint), sequences)
    distance = float((ours - expected).norm() / expected.norm())
    by_itself = all_logits(fake_quantized(checkpoint, config, per_row=per_row), sequences)
    of_quantization = float((by_itself - unquantized).norm() / unquantized.norm())
    ours_of_quantization = float((ours - unquantized).norm() / unquantized.norm())
    print(f"{arch}: {distance:.4f}, fake quantization {of_quantization:.4f}, ours {ours_of_quantization:.4f}")
    assert distance < 0.02
    assert ours_of_quantization < 1.2 * of_quantization


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_logits_of_one_row_are_those_of_the_dequantized_weights(arch: str, tmp_path: Path) -> None:
    """No input is quantized."""
    checkpoint = write_tiny_checkpoint(
        tmp_path,
        arch,
        hidden=256,
        intermediate=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
        expert_intermediate=256,
        quantization="fp8-block",
    )
    model = Decoder(ModelConfig.read(checkpoint), TensorParallel(), torch.bfloat16, "cuda")
    load_weights(model.parameters, checkpoint)
    assert set(model.parameters.weights_by_type) == {"fp8-block"}
    exact_weights = load(checkpoint)
    tokens = range(5, 400, 13)
    with record_quantized_inputs() as recorded:
        ours = torch.cat([all_logits(model, [[token]]).float().cpu() for token in tokens])
    expected = torch.cat([all_logits(exact_weights, [[token]]) for token in tokens])
    distance = float((ours - expected).norm() / expected.norm())
    print(f"{arch}: {distance:.4f}, {len(recorded)} products")
    assert distance < 0.015


@pytest.mark.captures
def test_rows_that_start_early_read_no_data_of_an_earlier_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched one after the other in the ordinary way, the same kernels give the same."""
    weights = [weight_of(1024, 1024) for _ in range(3)]
    wide, narrow = weight_of(4096, 1024), weight_of(1024, 2048)
    gain = torch.ones(1024, dtype=torch.bfloat16, device=CUDA)
    x = row_of(1024)

    def step() -> torch.Tensor:
        y, stream = x, torch.zeros_like(x)
        for _ in range(5):
            for weight in weights:
                y, stream = normed_fp8_row(y, stream, gain, 1e-6, weight.values, weight.scales)
            y = fp8_row(y, weights[0].values, weights[0].scales)
            y, stream = normed_fp8_row(y, stream, gain, 1e-6, wide.values, wide.scales, gated=True)
            y = fp8_row(y, narrow.values, narrow.scales)
        return y + stream

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    monkeypatch.setattr(dependent_launch_triton, "_has_dependent_launch", lambda device: False)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.captures
def test_a_graph_gives_the_bits_of_products_of_batches() -> None:
    """The kernels share the memory of partial sums, and begin before the previous one has ended."""
    x, weight = draw(100, 5120, dtype=torch.bfloat16, device=CUDA), weight_of(5120, 5120)
    assert share(100, 5120, 5120, multiprocessors(CUDA)).parts
    gain = torch.ones(5120, dtype=torch.bfloat16, device=CUDA)

    def step() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = fp8_batch(rms_norm_fp8(y, None, gain, 1e-6), weight.values, weight.scales)
        return y

    assert_a_graph_gives_the_bits_of(step)


@pytest.mark.captures
def test_a_graph_gives_the_bits_of_its_kernels() -> None:
    x, weight = draw(40, 1024, dtype=torch.bfloat16, device=CUDA), weight_of(1024, 1024)
    assert fp8_tile(40, 1024, 1024, in_parts=True) is not None
    gain = torch.ones(1024, dtype=torch.bfloat16, device=CUDA)

    def step() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = weight.product(rms_norm_fp8(y, None, gain, 1e-6), in_parts=True)
        return y

    assert_a_graph_gives_the_bits_of(step)
