"""Weights that stay in 4 bits, with the arithmetic of their kernels on a CPU; tests/gpu/test_int4.py runs these."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.kernels.linear.int4_packed import dequantize_words, pack_scales, pack_words, unpack_scales, unpack_words
from minisgl.layers.weights import parameters
from minisgl.layers.weights.int4 import Int4Weight
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import fill_random
from minisgl.toy.quantize import QUANTIZATION_CONFIGS
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks

SEQUENCES = [[1, 2, 3], list(range(40, 140))]
FORMATS = ("int4", "int4-zeros", "awq", "gptq")


def keep(monkeypatch: pytest.MonkeyPatch, *, on: bool) -> None:
    monkeypatch.setattr(parameters, "has_quantized_kernels", lambda dtype, device: on)


def write(folder: Path, arch: str, name: str | None, group_size: int | None = None) -> Path:
    """`group_size` None: 64."""
    extra = {}
    if group_size is not None and name is not None:
        config: dict[str, Any] = deepcopy(dict(QUANTIZATION_CONFIGS[name]))
        of_weights = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config
        of_weights["group_size"] = group_size
        extra["quantization_config"] = config
    return write_tiny_checkpoint(
        folder / f"{arch}-{name}",
        arch,
        quantization=name,
        hidden=256,
        intermediate=512,
        heads=4,
        kv_heads=4,
        head_dim=64,
        expert_intermediate=256,
        config_extra=extra,
    )


@given(
    seed=st.integers(0, 1000),
    blocks=st.integers(1, 3),
    steps=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_words_have_all_numbers(seed: int, blocks: int, steps: int, group: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (blocks * 64, steps * 128), dtype=torch.int32, generator=generator)
    words = pack_words(numbers)
    assert words.numel() * 8 == numbers.numel()
    assert torch.equal(unpack_words(words), numbers)
    scales = torch.rand(blocks * 64, steps * 128 // group, generator=generator).to(dtype)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.int32, generator=generator)
    found, found_zeros = unpack_scales(pack_scales(scales, zeros))
    assert torch.equal(found, scales.float()) and torch.equal(found_zeros, zeros)
    dense = (numbers - zeros.repeat_interleave(group, 1)).float() * found.repeat_interleave(group, 1)
    assert torch.equal(dequantize_words(words, pack_scales(scales, zeros)), dense.to(torch.bfloat16))


def test_a_word_has_the_weights_that_one_thread_multiplies() -> None:
    """Thread 4 g + c: output g of each 8, inputs 2 c and 2 c + 1 of each 8."""
    place = torch.zeros(128, 256, dtype=torch.int32)
    place[64 + 8 * 3 + 5, 128 + 32 * 3 + 16 + 2 * 3 + 1] = 9
    [[block, at]] = pack_words(place).nonzero().tolist()
    assert (block, at) == (1, 1024 + 128 * 3 + 4 * (4 * 5 + 3) + 3)
    assert int(pack_words(place)[block, at]) == 9 << 24


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(
    name: str, arch: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write(tmp_path, arch, name)
    keep(monkeypatch, on=False)
    expected = all_logits(load(checkpoint), SEQUENCES)
    keep(monkeypatch, on=True)

    def logits(parallel: TensorParallel) -> torch.Tensor:
        layer = (model := load(checkpoint, parallel)).layers[0]
        for weight in (layer.attention.qkv.weight, layer.attention.out.weight, layer.feed_forward.down.weight):
            assert isinstance(weight, Int4Weight)
        return all_logits(model, SEQUENCES, parallel)

    for ours in run_ranks(size, tmp_path, logits):
        # Scales and weights are rounded to bfloat16.
        assert (ours - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_32_are_rounded_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In projections and in experts."""
    checkpoint = write(tmp_path, "qwen3-moe", name, group_size=32)

    def weights() -> list[torch.Tensor]:
        layer = load(checkpoint).layers[1]
        found = layer.attention.qkv.weight, layer.attention.out.weight, *layer.feed_forward.experts
        assert all(isinstance(each, Int4Weight) is kept for each in found)
        return [each.dequantized(torch.bfloat16) for each in found]

    kept = False
    keep(monkeypatch, on=kept)
    expected = weights()
    kept = True
    keep(monkeypatch, on=kept)
    assert all(torch.equal(*pair) for pair in zip(weights(), expected, strict=True))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_have_the_dequantized_weights_rounded_once(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write(tmp_path, "qwen3-moe", name)

    def weights(parallel: TensorParallel) -> list[torch.Tensor]:
        experts = load(checkpoint, parallel).layers[1].feed_forward.experts
        return [each.dequantized(torch.bfloat16) for each in experts]

    keep(monkeypatch, on=False)
    expected = run_ranks(size, tmp_path, weights)
    keep(monkeypatch, on=True)
    assert isinstance(load(checkpoint).layers[0].feed_forward.experts.gate_up, Int4Weight)
    for ours, exact in zip(run_ranks(size, tmp_path, weights), expected, strict=True):
        assert [each.shape for each in ours] == [(8, 512 // size, 256), (8, 256, 256 // size)]
        assert all(torch.equal(*pair) for pair in zip(ours, exact, strict=True))


def test_a_weight_takes_half_a_byte_and_its_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path, "qwen3", "awq")
    keep(monkeypatch, on=False)
    dense = load(checkpoint).parameters.num_bytes
    keep(monkeypatch, on=True)
    linear = 2 * (256 * 3 * 256 + 256 * 256 + 3 * 256 * 512)
    assert dense - load(checkpoint).parameters.num_bytes == linear * 4 - linear // 2 - linear // 64 * 4


def test_scales_that_are_not_finite_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path, "llama", "gptq")
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        if (name := "model.layers.1.mlp.up_proj.scales") in tensors:
            tensors[name][0, 3] = torch.nan
            save_file(tensors, file)
    keep(monkeypatch, on=True)
    with pytest.raises(ModelError, match=r"up_proj.weight cannot be used: scales has values .* not finite") as caught:
        load(checkpoint)
    assert caught.value.code == "corrupt_checkpoint"


def test_random_weights_give_finite_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, on=True)
    config = ModelConfig.read(write(tmp_path, "qwen3", None), quantization="int4")
    model = Decoder(config, TensorParallel(), torch.float32, "cpu")
    fill_random(model.parameters)
    weight = model.layers[0].feed_forward.gate_up.weight
    assert isinstance(weight, Int4Weight)
    assert 0.8 < float(weight.dequantized(torch.float32).std() * 256**0.5) < 1.25
    assert all_logits(model, SEQUENCES).isfinite().all()
