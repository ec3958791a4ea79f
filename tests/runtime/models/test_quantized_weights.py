"""Checkpoints with quantized weights: they load to the weights that they stand for, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.hub.check import check_checkpoint
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.formats import Fp8Blocks, Int4Groups, read_quantization
from minisgl.layers.weights.int4 import Int4Weight
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import random_tensor
from minisgl.models.weights import load_weights
from minisgl.toy.quantize import QUANTIZATION_CONFIGS, quantize
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.family_checkpoints import write_family_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks

LAYER = "model.layers.1.mlp.up_proj"


def edit(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    return checkpoint


def edit_config(checkpoint: Path, change: Callable[[dict[str, object]], object]) -> Path:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))
    return checkpoint


def failure(checkpoint: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(checkpoint)
    return caught.value


def test_a_mixture_in_fp8_blocks_under_names_of_its_own_is_the_one_that_was_stored(tmp_path: Path) -> None:
    """As MiniMax M2 is published."""
    checkpoint = write_family_checkpoint(tmp_path, "minimax-m2")
    tensors = load_file(checkpoint / "model.safetensors")
    stored = {}
    for name, weight in tensors.items():
        if "proj.weight" not in name and ".experts." not in name:
            stored[name] = weight
            continue
        quantized = quantize(Fp8Blocks(), weight)
        tensors[name] = quantized.dense.float()
        stored |= {name.removesuffix("weight") + suffix: each for suffix, each in quantized.tensors.items()}
    save_file(tensors, checkpoint / "model.safetensors")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])
    save_file(stored, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = load(checkpoint)
    assert sum(source.format is not None for source in model.parameters.sources) == 4 * (4 + 3 * 6)
    assert torch.equal(all_logits(model, [[1, 2, 3]]), expected)


@pytest.mark.parametrize("stored_as", ["int4", "fp8-channel"])
def test_experts_of_gemma_4_have_tensors_of_their_own_where_they_are_quantized(stored_as: str, tmp_path: Path) -> None:
    """As llm-compressor writes them; Gemma's INT4 has groups of 32."""
    checkpoint = write_family_checkpoint(tmp_path, "gemma4, experts", moe_intermediate_size=32)
    config = json.loads((checkpoint / "config.json").read_text())
    settings: Any = deepcopy(dict(QUANTIZATION_CONFIGS[stored_as]))
    settings["ignore"] = ["lm_head", "re:.*router"]
    if stored_as == "int4":
        settings["config_groups"]["group_0"]["weights"]["group_size"] = 32
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    tensors = load_file(checkpoint / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        layers = {name.removesuffix(".weight"): weight}
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True)
            layers = {
                name.replace("gate_up_proj", f"{i}.{part}"): all_of[i] for part, all_of in halves for i in range(6)
            }
        elif name.endswith("experts.down_proj"):
            layers = {name.replace("down_proj", f"{i}.down_proj"): each for i, each in enumerate(weight)}
        elif "proj.weight" not in name or quantization.format_of(name.removesuffix(".weight")) is None:
            stored[name] = weight
            continue
        dense = []
        for layer, each in layers.items():
            quantized = quantize(quantization.format, each)
            stored |= {f"{layer}.{suffix}": part for suffix, part in quantized.tensors.items()}
            dense.append(quantized.dense.float())
        if name.endswith("experts.gate_up_proj"):
            dense = [torch.cat(pair) for pair in zip(dense[:6], dense[6:], strict=True)]
        tensors[name] = torch.stack(dense) if ".experts." in name else dense[0]
    save_file(tensors, checkpoint / "model.safetensors")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])
    save_file(stored, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model = load(checkpoint)
    assert sum(source.format is not None for source in model.parameters.sources) == 2 * (4 + 3 + 3 * 6)
    assert torch.equal(all_logits(model, [[1, 2, 3]]), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3-moe"])
@pytest.mark.parametrize("name", QUANTIZATION_CONFIGS)
def test_weights_are_bitwise_those_that_were_stored(name: str, arch: str, size: int, tmp_path: Path) -> None:
    """Every split, also within blocks, groups and packed numbers."""
    plain = write_tiny_checkpoint(tmp_path / "plain", arch, hidden=256, intermediate=512, expert_intermediate=192)
    stored: dict[str, torch.Tensor] = {}
    for file in plain.glob("*.safetensors"):
        stored |= load_file(file)
    checkpoint = write_tiny_checkpoint(
        tmp_path / "quantized", arch, hidden=256, intermediate=512, expert_intermediate=192, quantization=name
    )

    def check(parallel: TensorParallel) -> int:
        quantized = 0
        for source in load(checkpoint, parallel).parameters.sources:
            expected = stored[source.name]
            if source.format is not None:
                quantized += 1
                expected = quantize(source.format, expected).dense
            assert torch.equal(source.into, expected[source.take].float()), source.name
        return quantized

    experts = 8 if arch == "qwen3-moe" else 1
    assert run_ranks(size, tmp_path, check) == [2 * (4 + 3 * experts)] * size


@pytest.mark.parametrize("name", QUANTIZATION_CONFIGS)
def test_quantized_answers_are_close_to_those_of_the_original(name: str, tmp_path: Path) -> None:
    tokens = [list(range(3, 60))]
    expected = all_logits(load(write_tiny_checkpoint(tmp_path / "plain", "llama")), tokens)
    logits = all_logits(load(write_tiny_checkpoint(tmp_path / "quantized", "llama", quantization=name)), tokens)
    assert (logits - expected).norm() < (0.2 if name.startswith("fp8") else 0.6) * expected.norm()


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "gptq"])
def test_any_part_of_a_weight_can_be_dequantized(layout: str, symmetric: bool, size: int) -> None:
    weights = Int4Groups(layout, size, symmetric, plain_zeros=layout != "gptq")  # type: ignore[arg-type]
    stored = quantize(weights, random_tensor("weight", (96, 512), 0), torch.float16)

    def read(suffix: str, *take: slice) -> torch.Tensor:
        return stored.tensors[suffix][take]

    everything = slice(0, 96), slice(0, 512)
    for rows, columns in (everything, (slice(3, 50), slice(130, 390)), (slice(8, 9), slice(511, 512))):
        assert torch.equal(Int4Weight.dequantize(weights, read, rows, columns), stored.dense[rows, columns])


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "gptq"])
def test_weights_packed_by_the_tool_of_a_format_are_bitwise_those_that_it_dequantizes(layout: str) -> None:
    """The files are written by support.numerics.packed_tensors."""
    file = Path(__file__).parent / "packed" / f"{layout}.safetensors"
    weights = Int4Groups(layout, 64, symmetric=False, plain_zeros=layout != "gptq")  # type: ignore[arg-type]
    tensors = load_file(file)
    dense = tensors.pop("dense")
    rows, columns = dense.shape
    specs = weights.tensors(rows, columns)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    ours = Int4Weight.dequantize(
        weights, lambda suffix, *take: tensors[suffix][take], slice(0, rows), slice(0, columns)
    )
    assert ours.dtype == dense.dtype == torch.float16
    assert torch.equal(ours, dense)
    assert len(dense.unique()) > 500


@pytest.mark.parametrize("plain_zeros", [True, False])
def test_a_zero_point_of_zero_is_read(plain_zeros: bool) -> None:
    weights = Int4Groups("gptq", 64, symmetric=False, plain_zeros=plain_zeros)
    stored = quantize(weights, torch.rand(16, 128) + 0.1, torch.float16)
    ours = Int4Weight.dequantize(
        weights, lambda suffix, *take: stored.tensors[suffix][take], slice(0, 16), slice(0, 128)
    )
    assert torch.equal(ours, stored.dense)
    assert float(ours.min()) >= 0


def test_layers_in_ignore_stay_as_they_are(tmp_path: Path) -> None:
    """By name, by a part of the name and by regular expression."""
    config = dict(QUANTIZATION_CONFIGS["fp8-channel"])
    config["ignore"] = ["lm_head", "re:.*down_proj", LAYER]
    checkpoint = write_tiny_checkpoint(
        tmp_path, "qwen2", quantization="fp8-channel", config_extra={"quantization_config": config}
    )
    formats = {source.name: source.format for source in load(checkpoint).parameters.sources}
    plain = [name for name, kind in formats.items() if kind is None and name.endswith("proj.weight")]
    assert plain == [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]


def test_a_fused_projection_may_be_quantized_in_part(tmp_path: Path) -> None:
    config = QUANTIZATION_CONFIGS["fp8-block"] | {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}
    checkpoint = write_tiny_checkpoint(
        tmp_path / "part", "qwen2", quantization="fp8-block", config_extra={"quantization_config": config}
    )
    original = write_tiny_checkpoint(tmp_path / "plain", "qwen2")
    key = slice(128, 192)
    first, plain = (load(each).layers[0].attention.qkv.weight for each in (checkpoint, original))
    assert isinstance(first, DenseWeight) and isinstance(plain, DenseWeight)
    assert torch.equal(first.values[key], plain.values[key])
    assert not torch.equal(first.values[:128], plain.values[:128])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fp8-block", "weight_scale_inv"),
        ("fp8-channel", "weight_scale"),
        ("fp8-tensor", "input_scale"),
        ("int4", "weight_scale"),
        ("int4-zeros", "weight_zero_point"),
        ("awq", "scales"),
        ("gptq", "qzeros"),
    ],
)
def test_a_missing_scale_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization=name)
    error = failure(edit(checkpoint, lambda tensors: tensors.pop(f"{LAYER}.{tensor}")))
    assert error.code == "missing_tensor"
    assert f"{LAYER}.{tensor}" in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("fp8-block", "weight_scale_inv"), ("fp8-channel", "weight_scale"), ("int4", "weight_scale"), ("awq", "scales")],
)
def test_a_scale_that_is_not_finite_is_rejected(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization=name)
    error = failure(edit(checkpoint, lambda tensors: tensors[f"{LAYER}.{tensor}"].view(-1)[-1:].fill_(value)))
    assert error.code == "corrupt_checkpoint"
    assert f"{LAYER}.weight" in str(error)
    assert tensor in str(error)


def test_a_quantized_weight_that_is_not_finite_is_rejected(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-block")
    error = failure(edit(checkpoint, lambda tensors: tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 4].fill_(0x7F)))
    assert error.code == "corrupt_checkpoint"
    assert f"{LAYER}.weight has values that are not finite" in str(error)


def test_a_layer_that_is_not_quantized_but_should_be_is_named(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-block")

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].to(torch.bfloat16)

    error = failure(edit(checkpoint, restore))
    assert error.code == "wrong_dtype"
    assert all(part in str(error) for part in (f"{LAYER}.weight", "BF16", "F8_E4M3", "quantization_config"))


def test_a_layer_that_is_quantized_in_spite_of_ignore_is_named(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-block")
    edit_config(checkpoint, lambda config: config.update(modules_to_not_convert=["mlp"]))
    error = failure(checkpoint)
    assert error.code == "wrong_dtype"
    assert "model.layers.0.mlp.gate_proj.weight is stored as F8_E4M3" in str(error)


@pytest.mark.parametrize("suffix", ["weight_packed", "qweight"])
def test_a_quantized_head_is_named(suffix: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="int4", tied=False)
    edit(checkpoint, lambda tensors: tensors.update({f"lm_head.{suffix}": tensors.pop("lm_head.weight")}))
    error = failure(checkpoint)
    assert error.code == "quantized_checkpoint"
    assert "lm_head is quantized" in str(error) and "the LM head" in str(error)


def test_scales_of_another_block_size_are_rejected(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-block")
    error = failure(edit(checkpoint, lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(4, 2)})))
    assert error.code == "wrong_shape"
    assert all(part in str(error) for part in ("weight_scale_inv", "[4, 2]", "[2, 1]"))


def test_weights_in_another_group_size_are_rejected(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="awq")
    error = failure(edit_config(checkpoint, lambda config: config.update(group_size=128)))
    assert error.code == "wrong_shape"
    assert "scales" in str(error) or "qzeros" in str(error)


def test_inputs_in_another_order_are_rejected_although_config_json_denies_them(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="gptq")
    error = failure(edit(checkpoint, lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0)})))
    assert error.code == "corrupt_checkpoint"
    assert "act-order" in str(error)


def test_an_order_of_inputs_that_the_format_has_no_tensor_for_is_rejected(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="int4")
    edit(checkpoint, lambda t: t.update({f"{LAYER}.weight_g_idx": torch.arange(256, dtype=torch.int32) % 2}))
    error = failure(checkpoint)
    assert error.code == "quantized_checkpoint"
    assert all(part in str(error) for part in ("act-order", f"{LAYER}.weight_g_idx", "awq"))
    assert [problem.message for problem in check_checkpoint(checkpoint).problems] == [str(error)]


def test_scales_in_another_file_than_the_weight_are_found(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", quantization="fp8-block")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(index[name] != index[f"{name}_scale_inv"] for name in index if f"{name}_scale_inv" in index)
    assert all_logits(load(checkpoint), [[1, 2, 3]]).isfinite().all()


def test_a_scale_of_the_whole_tensor_may_have_no_dimension(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-tensor")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: value[0] for name, value in tensors.items() if name.endswith("_scale")})

    assert torch.equal(all_logits(load(edit(checkpoint, flatten)), [[1, 2, 3]]), expected)


@pytest.mark.parametrize("names", [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")])
def test_one_scale_a_tensor_is_read_under_the_names_of_both_tools(names: tuple[str, str], tmp_path: Path) -> None:
    """Of AutoFP8, and of transformers as Mistral uses it."""
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-tensor")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for own, name in zip(("weight_scale", "input_scale"), names, strict=True):
            for each in [each for each in tensors if each.endswith(f".{own}")]:
                tensors[f"{each.removesuffix(own)}{name}"] = tensors.pop(each)[0].float()

    edit(checkpoint, rename)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (checkpoint / "config.json").write_text(json.dumps(config))
    # The scale was stored, and multiplied, in 16 bits.
    assert (all_logits(load(checkpoint), [[1, 2, 3]]) - expected).norm() < 0.02 * expected.norm()
    error = failure(edit(checkpoint, lambda tensors: tensors.pop(f"{LAYER}.{names[1]}")))
    assert error.code == "missing_tensor" and f"{LAYER}.input_scale" in str(error)


def test_the_bytes_that_were_read_are_those_of_the_files(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="fp8-block")
    model = Decoder(ModelConfig.read(checkpoint), TensorParallel(), torch.float32, "cpu")
    seen: list[tuple[int, int]] = []
    total = load_weights(model.parameters, checkpoint, progress=lambda *at: seen.append(at))
    assert total == sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
    assert seen[-1] == (total, total)


def test_an_override_removes_the_quantization(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", quantization="awq")
    assert ModelConfig.read(checkpoint).quantization is not None
    assert ModelConfig.read(checkpoint, {"quantization_config": None}).quantization is None
