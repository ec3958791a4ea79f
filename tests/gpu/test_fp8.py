"""Products with FP8 weights against float64 of the same numbers, and models against the same quantization on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.fp8_linear_gluon import Tile, fp8_linear, fp8_tile
from minisgl.kernels.fp8_rows import BLOCK, E4M3_MAX, Fp8Rows, dequantize_rows
from minisgl.kernels.fp8_rows_triton import rms_norm_fp8, silu_and_mul_fp8
from minisgl.kernels.norm_triton import rms_norm_cuda
from minisgl.kernels.quantize_rows import quantize_rows
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.fp8_weight import Fp8Weight, fp8_product
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.weights import load_weights
from minisgl.toy.tiny import write_tiny_checkpoint
from support.kernels.decode_kernels import draw, poisoned_outputs
from support.kernels.sizes import sized
from support.numerics.fake_quantization import fake_quantized, record_quantized_inputs
from support.numerics.ranks import all_logits, load

CUDA = torch.device("cuda")


def weight_of(outputs: int, inputs: int) -> Fp8Weight:
    # Torch turns what exceeds the largest number into NaN.
    wide = draw(outputs, inputs, dtype=torch.bfloat16, device=CUDA, scale=100.0).clamp(-E4M3_MAX, E4M3_MAX)
    values = wide.to(torch.float8_e4m3fn)
    scales = draw(outputs // BLOCK, inputs // BLOCK, dtype=torch.float32, device=CUDA).abs() * 0.01 * inputs**-0.5
    return Fp8Weight(values, scales + 1e-4)


def exact(x: Fp8Rows, weight: Fp8Weight) -> torch.Tensor:
    blocks = weight.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return dequantize_rows(x).double() @ (weight.values.double() * blocks).T


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    assert ours.isfinite().all()
    assert (ours.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("tile", [Tile(16, 128, 1, 5), Tile(16, 64, 1, 8), Tile(32, 128, 3, 4), Tile(64, 64, 2, 6)])
@pytest.mark.parametrize("rows", sized([1, 9, 16, 31, 64, 65, 130], [9, 130]))
def test_a_product(rows: int, tile: Tile) -> None:
    x, weight = quantize_rows(draw(rows, 1408, dtype=torch.bfloat16, device=CUDA)), weight_of(768, 1408)
    with poisoned_outputs():
        ours = fp8_linear(x, weight.values, weight.scales, tile)
    assert ours.shape == ((rows, 768) if tile.splits == 1 else (tile.splits, rows, 768))
    assert_near(ours if tile.splits == 1 else ours.sum(0), exact(x, weight))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", sized([1, 3, 17, 64, 65, 77, 128, 129, 250, 1001], [3, 17, 64, 65, 129]))
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1152, 896), (768, 512), (128, 128), (896, 640), (7168, sized(5120, 2048))]
)
def test_a_product_of_any_size_and_number_of_rows(outputs: int, inputs: int, rows: int, bias: bool) -> None:
    x, weight = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA), weight_of(outputs, inputs)
    shift = draw(outputs, dtype=torch.bfloat16, device=CUDA) if bias else None
    expected = exact(quantize_rows(x), weight)
    expected = expected if shift is None else expected + shift.double()
    with poisoned_outputs():
        ours = fp8_product(x, weight, shift)
        parts = fp8_product(x, weight, shift, in_parts=True)
    assert_near(ours, expected)
    assert_near(parts if parts.dim() == 2 else parts.sum(0), expected)


def test_large_sums_keep_their_precision() -> None:
    """The tensor cores alone would round each sum to 14 bits."""
    inputs = 17408
    values = torch.ones(128, inputs, device=CUDA).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.ones(1, inputs // BLOCK, device=CUDA))
    for rows in (1, 256):
        x = quantize_rows(torch.full((rows, inputs), 1.0, dtype=torch.bfloat16, device=CUDA))
        assert_near(fp8_product(x, weight), exact(x, weight), 1e-3 if rows == 1 else 4e-3)


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


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_are_close_to_those_of_the_same_quantization_in_float32(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path, arch, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, quantization="fp8-block"
    )
    model = Decoder(ModelConfig.read(checkpoint), TensorParallel(), torch.bfloat16, "cuda")
    load_weights(model.parameters, checkpoint)
    for layer in model.layers:
        assert isinstance(layer.attention.qkv.weight, Fp8Weight) and isinstance(layer.attention.out.weight, Fp8Weight)
    exact_weights = load(checkpoint)
    sequences = [[int(token) for token in torch.randint(3, 500, (length,))] for length in (1, 7, 90, 300)]
    with record_quantized_inputs() as recorded:
        ours = all_logits(model, sequences).float().cpu()
    assert len(recorded) == 4 * len(model.layers)
    expected = all_logits(fake_quantized(checkpoint, recorded=recorded), sequences)
    unquantized = all_logits(exact_weights, sequences)
    distance = float((ours - expected).norm() / expected.norm())
    by_itself = all_logits(fake_quantized(checkpoint), sequences)
    of_quantization = float((by_itself - unquantized).norm() / unquantized.norm())
    ours_of_quantization = float((ours - unquantized).norm() / unquantized.norm())
    print(f"{arch}: {distance:.4f}, fake quantization {of_quantization:.4f}, ours {ours_of_quantization:.4f}")
    assert distance < 0.02
    assert ours_of_quantization < 1.2 * of_quantization


@pytest.mark.captures
def test_a_graph_gives_the_bits_of_its_kernels() -> None:
    x, weight = draw(40, 1024, dtype=torch.bfloat16, device=CUDA), weight_of(1024, 1024)
    assert fp8_tile(40, 1024, 1024, in_parts=True) is not None
    gain = torch.ones(1024, dtype=torch.bfloat16, device=CUDA)

    def step() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = fp8_product(rms_norm_fp8(y, None, gain, 1e-6), weight, in_parts=True)
        return y

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
