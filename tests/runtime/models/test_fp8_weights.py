"""Weights that stay in FP8, with the arithmetic of their kernels on a CPU. tests/gpu/test_fp8.py runs the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.layers.weights import parameters
from minisgl.layers.weights.allocate import Experts
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.weight import Weight
from minisgl.models.blocks.experts import SparseFeedForward
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder, DecoderLayer
from minisgl.models.random_weights import fill_random
from minisgl.toy.quantize import QUANTIZATION_CONFIGS
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.fake_quantization import Rounding, fake_quantized
from support.numerics.ranks import all_logits, load, run_ranks

SEQUENCES = [[1, 2, 3], list(range(40, 140))]


@pytest.fixture
def stays_fp8(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def switch(on: bool) -> None:
        monkeypatch.setattr(parameters, "has_quantized_kernels", lambda dtype, device: on)

    return switch


def write(folder: Path, arch: str = "qwen3", **sizes: Any) -> Path:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 4, "head_dim": 64} | sizes
    return write_tiny_checkpoint(folder / arch, arch, quantization="fp8-block", **sizes)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
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
    assert (dense.weights_by_type, model.weights_by_type) == ({"float32": linear}, {"fp8-block": linear})
    assert dense.num_bytes - model.num_bytes == linear * 3 - linear // 128**2 * 4
    assert model.num_elements - linear // 128**2 == dense.num_elements


MOE = {"heads": 4, "kv_heads": 4, "head_dim": 64, "experts": 4, "expert_intermediate": 256}


@pytest.mark.parametrize("size", [1, 2])
def test_experts_stay_in_blocks_on_each_rank(size: int, tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    checkpoint = write(tmp_path, "qwen3-moe", **MOE)
    stays_fp8(False)
    dense = load(checkpoint).layers[0].feed_forward
    assert isinstance(dense, SparseFeedForward) and isinstance(dense.experts.gate_up, DenseWeight)
    assert isinstance(dense.experts.down, DenseWeight)
    gates, ups = dense.experts.gate_up.values.chunk(2, 1)
    stays_fp8(True)

    def experts(parallel: TensorParallel) -> Experts:
        model = load(checkpoint, parallel)
        assert set(model.parameters.weights_by_type) == {"fp8-block"}
        feed_forward = model.layers[0].feed_forward
        assert isinstance(feed_forward, SparseFeedForward)
        return feed_forward.experts

    for rank, ours in enumerate(run_ranks(size, tmp_path, experts)):
        assert isinstance(ours.gate_up, Fp8Weight) and isinstance(ours.down, Fp8Weight)
        expected = torch.cat([gates.chunk(size, 1)[rank], ups.chunk(size, 1)[rank]], 1)
        assert torch.equal(ours.gate_up.dequantized(torch.float32), expected)
        assert torch.equal(ours.down.dequantized(torch.float32), dense.experts.down.values.chunk(size, 2)[rank])


@pytest.mark.parametrize("size", [1, 2])
def test_a_scale_of_a_whole_tensor_is_that_of_its_channels_or_of_the_blocks_of_an_expert(
    size: int, tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    """Whatever projections are fused, each keeps its own scale, so nothing is rounded again."""
    sizes: Any = {"hidden": 256, "intermediate": 512, **MOE}
    checkpoint = write_tiny_checkpoint(tmp_path / "tensors", "qwen3-moe", quantization="fp8-tensor", **sizes)
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)

    def exact(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()

    def check(parallel: TensorParallel) -> set[str]:
        model = load(checkpoint, parallel)
        layer, prefix = model.layers[1], "model.layers.1"
        assert isinstance(layer.feed_forward, SparseFeedForward)
        gate_up, down = layer.feed_forward.experts
        assert isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight)
        for index in range(4):
            expert = f"{prefix}.mlp.experts.{index}"
            halves = [exact(f"{expert}.{each}_proj").chunk(size)[parallel.rank] for each in ("gate", "up")]
            assert torch.equal(gate_up.part(index).dequantized(torch.float32), torch.cat(halves))
            part = exact(f"{expert}.down_proj").chunk(size, 1)[parallel.rank]
            assert torch.equal(down.part(index).dequantized(torch.float32), part)
        rows = [exact(f"{prefix}.self_attn.{each}_proj").chunk(size)[parallel.rank] for each in "qkv"]
        assert torch.equal(layer.attention.qkv.weight.dequantized(torch.float32), torch.cat(rows))
        assert all_logits(model, SEQUENCES, parallel).isfinite().all()
        return set(model.parameters.weights_by_type)

    stays_fp8(True)
    assert run_ranks(size, tmp_path, check) == [{"fp8-block", "fp8-channel"}] * size


def test_experts_in_blocks_give_finite_logits(tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    stays_fp8(True)
    config = ModelConfig.read(write(tmp_path, "qwen3-moe", **MOE))
    model = Decoder(config, TensorParallel(), torch.float32, "cpu")
    fill_random(model.parameters)
    assert all_logits(model, SEQUENCES).isfinite().all()


@pytest.mark.parametrize("kind", ["width", "activation", "one expert"])
def test_experts_without_kernels_are_dequantized(kind: str, tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    """All of a layer, even if only one of them is not in blocks of 128 × 128."""
    changes: dict[str, Any] = {
        "width": {"expert_intermediate": 64},
        "activation": {"activation": "gelu"},
        "one expert": {
            "config_extra": {
                "quantization_config": QUANTIZATION_CONFIGS["fp8-block"]
                | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.experts.2.up_proj"]}
            }
        },
    }
    checkpoint = write(tmp_path, "qwen3-moe", **MOE | changes[kind])
    stays_fp8(True)
    model = load(checkpoint)
    first, second = (layer.feed_forward for layer in model.layers)
    assert isinstance(first, SparseFeedForward) and isinstance(second, SparseFeedForward)
    assert isinstance(first.experts.gate_up, DenseWeight) and isinstance(first.experts.down, DenseWeight)
    assert isinstance(second.experts.gate_up, Fp8Weight) is (kind == "one expert")
    assert all_logits(model, SEQUENCES).isfinite().all()


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
    assert isinstance(model.layers[0].attention.qkv.weight, DenseWeight)
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


def write_plain(folder: Path, arch: str, **sizes: int) -> Path:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64} | sizes
    return write_tiny_checkpoint(folder / f"{arch}-plain", arch, **sizes)  # type: ignore[arg-type]


def copy_weights(dense: DecoderLayer, kept: DecoderLayer) -> None:
    """Fill the weights of `dense` with those of `kept`, from which they differ by rounding."""
    for ours, theirs in zip(weights_of(dense), weights_of(kept), strict=True):
        assert isinstance(ours, Rounding) and isinstance(theirs, Fp8Weight)
        exact = theirs.dequantized(torch.float32)
        assert (ours.values - exact).norm() < 3e-3 * exact.norm()
        ours.values.copy_(exact)


def weights_of(layer: DecoderLayer) -> list[Weight]:
    assert isinstance(layer.feed_forward, FeedForward)
    layers = layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down
    return [each.weight for each in layers]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_channels_and_weights_quantized_while_loading_give_the_logits_of_fake_quantization(
    arch: str, size: int, tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    stored = write_tiny_checkpoint(tmp_path / "stored", arch, quantization="fp8-channel", **sizes)  # type: ignore[arg-type]
    plain = write_plain(tmp_path, arch)
    for checkpoint, quantization in ((stored, None), (plain, "fp8")):
        config = ModelConfig.read(checkpoint, quantization=quantization)
        stays_fp8(False)
        fake = fake_quantized(checkpoint, config, per_row=True)
        stays_fp8(True)
        for dense, kept in zip(fake.layers, load(checkpoint, config=config).layers, strict=True):
            # The format's tool rounds weights to the type of their scales.
            copy_weights(dense, kept)
        expected = all_logits(fake, SEQUENCES)

        def logits(
            parallel: TensorParallel, checkpoint: Path = checkpoint, config: ModelConfig = config
        ) -> torch.Tensor:
            model = load(checkpoint, parallel, config=config)
            weight = model.layers[0].attention.qkv.weight
            assert isinstance(weight, Fp8Weight) and weight.per_channel
            assert set(model.parameters.weights_by_type) == {"fp8-channel"}
            return all_logits(model, SEQUENCES, parallel)

        exact = all_logits(load(plain), SEQUENCES)
        for ours in run_ranks(size, tmp_path, logits):
            if size == 1:
                assert (ours - expected).norm() < 1e-5 * expected.norm()
            # Ranks quantize their part of each row of the inputs, and their columns of weights, by themselves.
            assert (ours - exact).norm() < 1.2 * (expected - exact).norm()


@pytest.mark.parametrize("arch", ["llama", "qwen3-moe"])
def test_weights_quantized_while_loading_are_near_the_original(arch: str, tmp_path: Path) -> None:
    checkpoint = write_plain(tmp_path, arch)
    expected = all_logits(load(checkpoint), SEQUENCES)
    quantized = load(checkpoint, config=ModelConfig.read(checkpoint, quantization="fp8"))
    logits = all_logits(quantized, SEQUENCES)
    assert 0.003 < (logits - expected).norm() / expected.norm() < 0.2
    assert torch.equal(quantized.head.weight.values, load(checkpoint).head.weight.values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_any_type_are_quantized_as_they_are_stored(
    dtype: Any, tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    """They are rounded once, not to the type of the model before."""
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", dtype=dtype)
    files = [load_file(file) for file in checkpoint.glob("*.safetensors")]
    (stored,) = (file[name] for file in files for name in file if name == "model.layers.0.self_attn.o_proj.weight")
    assert stored.dtype == getattr(torch, dtype)
    config = ModelConfig.read(checkpoint, quantization="fp8")
    scales = stored.float().abs().amax(1, keepdim=True) / 448
    rounded = (stored.float() / scales).to(torch.float8_e4m3fn).float() * scales
    stays_fp8(True)
    kept = load(checkpoint, config=config).layers[0].attention.out.weight
    assert isinstance(kept, Fp8Weight) and torch.equal(kept.dequantized(torch.float32), rounded)
    stays_fp8(False)
    dense = load(checkpoint, config=config).layers[0].attention.out.weight
    assert isinstance(dense, DenseWeight) and torch.allclose(dense.values, rounded, rtol=1e-6)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    message = "--quantization fp8: the checkpoint is quantized already, as fp8-block"
    with pytest.raises(ModelError, match=message) as caught:
        ModelConfig.read(write(tmp_path), quantization="fp8")
    assert caught.value.code == "already_quantized"


@pytest.mark.parametrize("on", [False, True])
def test_weights_that_are_not_finite_are_not_quantized(
    on: bool, tmp_path: Path, stays_fp8: Callable[[bool], None]
) -> None:
    checkpoint = write_plain(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][3, 4] = torch.nan
            save_file(tensors, file)
    stays_fp8(on)
    with pytest.raises(ModelError, match=f"{name} can.* be .*not finite") as caught:
        load(checkpoint, config=ModelConfig.read(checkpoint, quantization="fp8"))
    assert caught.value.code == "corrupt_checkpoint"


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8"])
def test_random_channels_give_finite_logits(kind: str, tmp_path: Path, stays_fp8: Callable[[bool], None]) -> None:
    stays_fp8(True)
    if kind == "fp8":
        config = ModelConfig.read(write_plain(tmp_path, "qwen3"), quantization="fp8")
    else:
        sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
        config = ModelConfig.read(write_tiny_checkpoint(tmp_path, "qwen3", quantization=kind, **sizes))  # type: ignore[arg-type]
    model = Decoder(config, TensorParallel(), torch.float32, "cpu")
    fill_random(model.parameters)
    for weight in (model.layers[0].feed_forward.gate_up.weight, model.layers[0].feed_forward.down.weight):
        assert isinstance(weight, Fp8Weight)
        assert 0.5 < float(weight.dequantized(torch.float32).std() * weight.values.shape[1] ** 0.5) < 2
    assert all_logits(model, SEQUENCES).isfinite().all()
