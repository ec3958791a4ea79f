"""What is particular to gpt-oss: experts in MXFP4, and properties of layers that no other family has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.weights.formats import Mxfp4Blocks, read_quantization
from minisgl.layers.weights.mxfp4 import Mxfp4Weight
from minisgl.models.blocks.experts import SparseFeedForward
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.decoder_config import ClampedGate, LayerConfig
from minisgl.models.weights import load_weights
from minisgl.moe.routing_config import RoutingConfig
from support.numerics.family_checkpoints import store_experts_in_mxfp4, write_family_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks

REAL: Final = BUILTIN_CONFIGS["gpt-oss-20b"]
SEQUENCES: Final = [[3 + i * 7 % 290 for i in range(60)], [5, 6, 7]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "plain", "gpt-oss")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_family_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "mxfp4", "gpt-oss")
    store_experts_in_mxfp4(folder)
    return folder


@pytest.fixture(scope="module")
def dense(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that the quantized checkpoint stands for, as Transformers dequantizes them."""
    folder = tmp_path_factory.mktemp("dequantized")
    tensors = load_file(quantized / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        stored = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(*stored, dtype=torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_in_mxfp4_give_the_logits_of_the_weights_that_they_stand_for(
    quantized: Path, dense: Path, tmp_path: Path
) -> None:
    expected = all_logits(load(dense), SEQUENCES)
    assert torch.equal(all_logits(load(quantized), SEQUENCES), expected)

    def rank_logits(parallel: Any) -> torch.Tensor:
        # 96 features are three blocks: one rank has two of them.
        return all_logits(load(quantized, parallel), SEQUENCES, parallel)

    for logits in run_ranks(2, tmp_path, rank_logits):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_any_part_of_a_weight_in_mxfp4_is_bitwise_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (96, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (96, 4), dtype=torch.uint8, generator=generator)
    tensors = {"_blocks": blocks, "_scales": scales}
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.bfloat16)[0].T

    def read(suffix: str, *take: slice) -> torch.Tensor:
        return tensors[suffix][take]

    everything = slice(0, 96), slice(0, 128)
    for rows, columns in (everything, (slice(1, 90, 2), slice(32, 96)), (slice(3, 50), slice(5, 77))):
        found = Mxfp4Weight.dequantize(Mxfp4Blocks(), read, rows, columns)
        assert torch.equal(found.bfloat16(), expected[rows, columns])
        assert torch.equal(found, found.bfloat16().float())


def test_weights_that_stay_in_mxfp4_are_those_of_the_checkpoint_and_take_as_many_bytes(
    quantized: Path, dense: Path
) -> None:
    kept = Decoder(ModelConfig.read(quantized), TensorParallel(), torch.float32, "cpu", keep_quantized=True)
    load_weights(kept.parameters, quantized)
    plain = load(dense)
    for ours, theirs in zip(kept.layers, plain.layers, strict=True):
        assert isinstance(ours.feed_forward, SparseFeedForward) and isinstance(theirs.feed_forward, SparseFeedForward)
        (gate_up, down), (dense_gate_up, dense_down) = ours.feed_forward.experts, theirs.feed_forward.experts
        assert isinstance(gate_up, Mxfp4Weight) and isinstance(down, Mxfp4Weight)
        both = gate_up.dequantized(torch.float32)
        # 96 gates are padded to 128.
        assert both.shape == (5, 256, 64) and not both[:, 96:128].any() and not both[:, 224:].any()
        found = torch.cat((both[:, :96], both[:, 128:224]), dim=1)
        assert torch.equal(found, dense_gate_up.dequantized(torch.float32))
        assert torch.equal(down.dequantized(torch.float32), dense_down.dequantized(torch.float32))
    torch.testing.assert_close(all_logits(kept, SEQUENCES), all_logits(plain, SEQUENCES), rtol=0, atol=1e-4)


def test_a_20b_takes_little_more_memory_than_its_checkpoint() -> None:
    config = ModelConfig.parse(REAL)
    parameters = checkpoint_parameters(config, keep_quantized=True)
    # The checkpoint has 13.76 GB.
    assert 13.7e9 < parameters.num_bytes < 14.3e9
    assert parameters.weights_by_type["mxfp4"] > 19e9
    for ranks in (2, 4, 8):
        part = checkpoint_parameters(config, keep_quantized=True, ranks=ranks).num_bytes
        assert part < 1.25 * parameters.num_bytes / ranks


@pytest.mark.parametrize("exceptions", [None, ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]])
def test_only_experts_are_in_mxfp4(exceptions: list[str] | None) -> None:
    found = read_quantization({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": exceptions}})
    assert found is not None and found.name == "mxfp4"
    assert found.format_of("model.layers.3.mlp.experts.gate_up_proj") == Mxfp4Blocks()
    for layer in ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.router", "lm_head"):
        assert found.format_of(layer) is None


@pytest.mark.parametrize("exponent", [255, 200])
def test_a_scale_that_kernels_cannot_take_is_refused(quantized: Path, tmp_path: Path, exponent: int) -> None:
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = exponent
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Decoder(ModelConfig.read(quantized), TensorParallel(), torch.float32, "cpu", keep_quantized=True)
    with pytest.raises(ModelError, match=r"down_proj") as error:
        load_weights(model.parameters, tmp_path)
    assert error.value.code == "corrupt_checkpoint"


def _of_attention(**changes: Any) -> Callable[[LayerConfig], LayerConfig]:
    return lambda layer: replace(layer, attention=replace(layer.attention, **changes))


def _of_experts(**changes: Any) -> Callable[[LayerConfig], LayerConfig]:
    return lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, **changes))


KNOBS: Final[Mapping[str, Callable[[LayerConfig], LayerConfig]]] = {
    "sinks": _of_attention(sinks=False),
    "windows": _of_attention(window=None),
    "a window of one token less": lambda layer: (
        layer if layer.attention.window is None else _of_attention(window=layer.attention.window - 1)(layer)
    ),
    "biases of attention": _of_attention(qkv_bias=False),
    "bias of the output": _of_attention(output_bias=False),
    "YaRN": _of_attention(rope=RopeConfig(theta=1e4)),
    "the limit": _of_experts(activation=ClampedGate(alpha=1.702, limit=100.0)),
    "alpha": _of_experts(activation=ClampedGate(alpha=1.0, limit=0.3)),
    "the clamped activation": _of_experts(activation="silu"),
    "bias of the router": _of_experts(router_bias=False),
    "biases of experts": _of_experts(expert_bias=False),
    "normalized weights": _of_experts(routing=RoutingConfig()),
}


@pytest.mark.parametrize("name", KNOBS)
def test_each_property_moves_the_logits(name: str, checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig.read(checkpoint)
    expected = all_logits(load(checkpoint), SEQUENCES)
    layers = tuple(map(KNOBS[name], config.layers))
    without = replace(config, body=replace(config.decoder, layers=layers))
    needed = {name for source in checkpoint_parameters(without).sources for name in source.tensors}
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: tensors[name] for name in needed}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = all_logits(load(tmp_path, config=without), SEQUENCES)
    assert (found - expected).abs().max() > 0.1 * expected.std()


def test_fields_that_config_json_does_not_have_are_those_of_the_architecture() -> None:
    short = {name: REAL[name] for name in ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")}
    sizes = {name: REAL[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    given = {**short, **sizes, "max_position_embeddings": 131072, "num_local_experts": 32}
    assert ModelConfig.parse(given).decoder == ModelConfig.parse(REAL).decoder


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hidden_act": "gelu"}, "unsupported_activation"),
        ({"num_experts_per_tok": 64}, "invalid_config"),
        ({"swiglu_limit": 0.0}, "invalid_config"),
        ({"layer_types": ["linear_attention"] * 24}, "unsupported_layer"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.parse({**REAL, **change})
    assert error.value.code == code
