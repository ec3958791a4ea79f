"""Weights that stay in FP8, with the arithmetic of their kernels on a CPU. tests/gpu/test_fp8.py runs the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers import new_weight
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.errors import ModelError
from minisgl.models.random_weights import fill_random
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.fake_quantization import fake_quantized
from support.numerics.ranks import all_logits, load, run_ranks

SEQUENCES = [[1, 2, 3], list(range(40, 140))]


@pytest.fixture
def stays_fp8(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def switch(on: bool) -> None:
        monkeypatch.setattr(new_weight, "has_fp8_kernels", lambda parameters: on)

    return switch


def write(folder: Path, arch: str = "qwen3", **sizes: int) -> Path:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 4, "head_dim": 64} | sizes
    return write_tiny_checkpoint(folder / arch, arch, quantization="fp8-block", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_fake_quantization(
    arch: str, size: int, tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    checkpoint = write(tmp_path, arch)
    stays_fp8(False)
    expected = all_logits(fake_quantized(checkpoint), SEQUENCES)
    stays_fp8(True)

    def logits(parallel: TensorParallel) -> torch.Tensor:
        model = load(checkpoint, parallel)
        assert isinstance(model.layers[0].attention.qkv.weight, Fp8Weight)
        assert isinstance(model.layers[0].feed_forward.down.weight, Fp8Weight)
        return all_logits(model, SEQUENCES, parallel)

    for ours in run_ranks(size, tmp_path, logits):
        assert (ours - expected).norm() < (1e-5 if size == 1 else 0.03) * expected.norm()


def test_weights_take_one_byte(tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    checkpoint = write(tmp_path)
    stays_fp8(False)
    dense = load(checkpoint).parameters
    stays_fp8(True)
    model = load(checkpoint).parameters
    linear = 2 * (256 * 3 * 256 + 256 * 256 + 3 * 256 * 512)
    assert dense.num_bytes - model.num_bytes == linear * 3 - linear // 128**2 * 4
    assert model.num_elements - linear // 128**2 == dense.num_elements


def test_a_shard_that_cuts_a_block_is_dequantized(tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    checkpoint = write(tmp_path, kv_heads=2)
    stays_fp8(True)

    def kinds(parallel: TensorParallel) -> list[bool]:
        layer = load(checkpoint, parallel).layers[0]
        weights = (layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down)
        return [isinstance(each.weight, Fp8Weight) for each in weights]

    # A rank of two has 64 rows of keys.
    assert run_ranks(2, tmp_path, kinds) == [[False, True, True, True]] * 2
    assert run_ranks(4, tmp_path, kinds) == [[False, False, True, True]] * 4


def test_a_fused_projection_that_is_quantized_in_part_is_dequantized(
    tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    stays_fp8(True)
    checkpoint = write(tmp_path)
    ignored = {"quantization_config": {"modules_to_not_convert": ["k_proj"]}}
    config = ModelConfig.read(checkpoint, ignored)
    model = Decoder(config, TensorParallel(), torch.float32, "cpu")
    assert isinstance(model.layers[0].attention.qkv.weight, torch.Tensor)
    assert isinstance(model.layers[0].attention.out.weight, Fp8Weight)


@pytest.mark.parametrize(
    ("tensor", "damage"),
    [
        ("weight_scale_inv", lambda tensor: tensor.view(-1)[:1].fill_(torch.nan)),
        ("weight", lambda tensor: tensor.view(torch.uint8)[3, 4].fill_(0xFF)),
    ],
)
def test_values_that_are_not_finite_are_rejected(
    tensor: str, damage: Callable[[torch.Tensor], object], tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    checkpoint = write(tmp_path)
    name = f"model.layers.1.mlp.up_proj.{tensor}"
    tensors = load_file(checkpoint / "model.safetensors")
    damage(tensors[name])
    save_file(tensors, checkpoint / "model.safetensors")
    stays_fp8(True)
    with pytest.raises(ModelError, match=f"{name} has values that are not finite") as caught:
        load(checkpoint)
    assert caught.value.code == "corrupt_checkpoint"


def test_random_weights_give_finite_logits(tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    stays_fp8(True)
    checkpoint = write(tmp_path)
    model = Decoder(ModelConfig.read(checkpoint), TensorParallel(), torch.float32, "cpu")
    fill_random(model.parameters)
    weight = model.layers[0].feed_forward.gate_up.weight
    assert isinstance(weight, Fp8Weight)
    # As random weights of an unquantized model.
    assert 0.5 < float((weight.values.float() * weight.scales[0, 0]).std() * 256**0.5) < 2
    logits = all_logits(model, SEQUENCES)
    assert logits.isfinite().all()
    assert float(logits.std()) > 0.1
