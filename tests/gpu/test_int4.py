"""Products with weights of 4 bits against float64 of the same numbers, and models against a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.kernels.int4_dequantize_triton import dequantize_words_cuda
from minisgl.kernels.int4_linear_gluon import Int4Tile, int4_linear
from minisgl.kernels.int4_words import dequantize_words, pack_scales, pack_words
from minisgl.layers.int4_weight import Int4Weight, int4_product
from minisgl.toy.tiny import write_tiny_checkpoint
from support.kernels.decode_kernels import draw, poisoned_outputs
from support.numerics.ranks import all_logits, load

CUDA = torch.device("cuda")


def weight_of(outputs: int, inputs: int, group: int) -> Int4Weight:
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32, device=CUDA)
    zeros = torch.randint(0, 16, (outputs, inputs // group), dtype=torch.int32, device=CUDA)
    scales = torch.rand(outputs, inputs // group, device=CUDA) * 0.1 + 0.01
    return Int4Weight(pack_words(numbers), pack_scales(scales, zeros))


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    assert ours.isfinite().all()
    assert (ours.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("group", [64, 128])
def test_dequantized_weights_are_bitwise_those_of_a_cpu(group: int) -> None:
    weight = weight_of(768, 1408, group)
    expected = dequantize_words(weight.words.cpu(), weight.scales.cpu())
    assert torch.equal(dequantize_words_cuda(*weight).cpu(), expected)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(
    "tile", [Int4Tile(16, 128, 1, 6), Int4Tile(16, 64, 4, 3), Int4Tile(64, 64, 2, 3), Int4Tile(128, 64, 1, 2)]
)
@pytest.mark.parametrize("rows", [1, 9, 16, 64, 65, 130])
def test_a_product(rows: int, tile: Int4Tile, group: int) -> None:
    x, weight = draw(rows, 1408, dtype=torch.bfloat16, device=CUDA), weight_of(768, 1408, group)
    expected = x.double() @ weight.dequantized().double().T
    for _ in range(5):
        with poisoned_outputs():
            ours = int4_linear(x, weight.words, weight.scales, tile)
        assert ours.shape == ((rows, 768) if tile.splits == 1 else (tile.splits, rows, 768))
        assert_near(ours if tile.splits == 1 else ours.sum(0), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 77, 128, 129, 300, 1001])
@pytest.mark.parametrize(("outputs", "inputs"), [(1152, 896), (128, 128), (7168, 5120)])
def test_a_product_of_any_size_and_number_of_rows(outputs: int, inputs: int, rows: int, bias: bool) -> None:
    x, weight = draw(rows, inputs, dtype=torch.bfloat16, device=CUDA), weight_of(outputs, inputs, 128)
    shift = draw(outputs, dtype=torch.bfloat16, device=CUDA) if bias else None
    expected = x.double() @ weight.dequantized().double().T
    expected = expected if shift is None else expected + shift.double()
    with poisoned_outputs():
        ours = int4_product(x, weight, shift)
        parts = int4_product(x, weight, shift, in_parts=True)
    assert_near(ours, expected)
    assert_near(parts if parts.dim() == 2 else parts.sum(0), expected)


@pytest.mark.parametrize("name", ["int4", "awq"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_are_close_to_those_of_the_same_weights_in_float32(arch: str, name: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path, arch, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, quantization=name
    )
    model = load(checkpoint, dtype=torch.bfloat16, device="cuda")
    assert isinstance(model.layers[0].attention.qkv.weight, Int4Weight)
    sequences = [[int(token) for token in torch.randint(3, 500, (length,))] for length in (1, 7, 90, 300)]
    expected = all_logits(load(checkpoint), sequences)
    ours = all_logits(model, sequences).float().cpu()
    assert (ours - expected).norm() < 0.02 * expected.norm()
