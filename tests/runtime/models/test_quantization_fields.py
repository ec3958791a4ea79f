"""`quantization_config` of published checkpoints: what is read, and what is rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ModelError
from minisgl.layers.weights.formats import (
    Fp8Blocks,
    Fp8Channels,
    Int4Groups,
    Quantization,
    WeightFormat,
    read_quantization,
)
from minisgl.models.checkpoint import stored_tensors
from minisgl.models.config import ModelConfig

QWEN3_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    base = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False, "symmetric": True}
    return base | {"group_size": None, "block_structure": None, "actorder": None, "observer": "minmax"} | more


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.2,
        **more,
    }


TOKEN = args(8, "float", "token", dynamic=True)
AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True, "desc_act": False, "damp_percent": 0.01}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_FP8, Fp8Blocks()),
        (compressed(args(8, "float", "channel"), TOKEN, format="float-quantized"), Fp8Channels()),
        (
            compressed(args(8, "float", "tensor"), args(8, "float", "tensor"), format="naive-quantized"),
            Fp8Channels(per_tensor=True, static_inputs=True),
        ),
        (
            compressed(args(4, "int", "group", group_size=128), None, format="pack-quantized"),
            Int4Groups("compressed-tensors", 128, symmetric=True),
        ),
        (
            compressed(args(4, "int", "group", group_size=64, symmetric=False), None, format="pack-quantized"),
            Int4Groups("compressed-tensors", 64, symmetric=False),
        ),
        (
            # As Gemma 4 is published.
            compressed(args(4, "int", "group", group_size=32), None, format="pack-quantized"),
            Int4Groups("compressed-tensors", 32, symmetric=True),
        ),
        (
            compressed(args(4, "int", "group", group_size=128, actorder="static"), None, format="pack-quantized"),
            Int4Groups("compressed-tensors", 128, symmetric=True),
        ),
        (
            compressed(
                *(args(4, "int", "group", group_size=128), None),
                **{"sparsity_config": {"format": "dense", "global_sparsity": 0.14}, "transform_config": {}},
            ),
            Int4Groups("compressed-tensors", 128, symmetric=True),
        ),
        (QWEN3_FP8 | {"fmt": None, "activation_scheme": None}, Fp8Blocks()),
        # As Mistral publishes FP8, and as AutoFP8 wrote it.
        (
            {
                "activation_scheme": "static",
                "dequantize": False,
                "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
                "quant_method": "fp8",
                "weight_block_size": None,
            },
            Fp8Channels(per_tensor=True, static_inputs=True),
        ),
        (
            {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
            Fp8Channels(per_tensor=True, static_inputs=True),
        ),
        (
            {"activation_scheme": "dynamic", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
            Fp8Channels(per_tensor=True),
        ),
        (AWQ | {"modules_to_not_convert": None}, Int4Groups("awq", 128, symmetric=False)),
        (AWQ | {"version": "GEMM"}, Int4Groups("awq", 128, symmetric=False)),
        (AWQ | {"version": None}, Int4Groups("awq", 128, symmetric=False)),
        (AWQ | {"group_size": 32}, Int4Groups("awq", 32, symmetric=False)),
        (GPTQ | {"group_size": 32}, Int4Groups("gptq", 32, symmetric=True, plain_zeros=False)),
        (GPTQ, Int4Groups("gptq", 128, symmetric=True, plain_zeros=False)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "group_size": 64},
            Int4Groups("gptq", 64, symmetric=False, plain_zeros=True),
        ),
    ],
)
def test_formats_of_published_checkpoints_are_found(config: dict[str, Any], expected: WeightFormat) -> None:
    for field in ("quantization_config", "compression_config"):
        found = read_quantization({field: config})
        assert found is not None
        assert found.format == expected
        assert found.format_of("model.layers.3.mlp.up_proj") == expected
        assert found.name == {Fp8Blocks: "fp8-block", Fp8Channels: "fp8", Int4Groups: "int4"}[type(expected)]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4;"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4_AWQ"}, "modelopt_fp4 NVFP4_AWQ;"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"bits": 4}, "quant_method missing"),
        ({**QWEN3_FP8, "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({**QWEN3_FP8, "weight_block_size": None, "activation_scheme": None}, "without weight_block_size"),
        ({**QWEN3_FP8, "activation_scheme": "static"}, "static"),
        ({**QWEN3_FP8, "fmt": "e5m2"}, "e5m2"),
        (compressed(args(8, "int", "channel"), args(8, "int", "token", dynamic=True)), "int of 8 bits"),
        (
            compressed(args(4, "float", "tensor_group", group_size=16), None, format="nvfp4-pack-quantized"),
            "nvfp4-pack-quantized: weights float of 4 bits, inputs in 16 bits;",
        ),
        (
            compressed(
                args(4, "float", "tensor_group", group_size=16),
                args(4, "float", "tensor_group", group_size=16, dynamic="local"),
                format="nvfp4-pack-quantized",
            ),
            "nvfp4-pack-quantized: weights float of 4 bits, inputs float of 4 bits;",
        ),
        (compressed(args(4, "int", "channel"), None, format="pack-quantized"), "strategy channel"),
        (
            compressed(args(4, "int", "group", group_size=128, actorder="group"), None, format="pack-quantized"),
            "actorder group",
        ),
        (
            compressed(args(4, "int", "group", group_size=128, actorder="dynamic"), None, format="pack-quantized"),
            "actorder dynamic",
        ),
        (
            compressed(
                *(args(4, "int", "group", group_size=128), None),
                transform_config={"config_groups": {"R4": {"type": "hadamard"}}},
            ),
            "transforms",
        ),
        (compressed(args(4, "int", "group", group_size=16), None, format="pack-quantized"), "groups of 16"),
        (AWQ | {"group_size": -1}, "groups of -1"),
        (compressed(args(8, "float", "block"), TOKEN), "strategy block"),
        (compressed(args(8, "float", "channel"), args(8, "int", "token", dynamic=True)), "inputs int of 8 bits"),
        (compressed(args(8, "float", "channel"), args(8, "float", "group", dynamic=True)), "inputs per group"),
        (compressed(args(8, "float", "channel"), TOKEN, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 8}, "awq of 8 bits"),
        (AWQ | {"lm_head": True}, "awq with a quantized lm_head"),
        (AWQ | {"dynamic": {".*mlp.*": {"bits": 8}}}, "awq with other settings for some layers"),
        (compressed(args(8, "float", "channel"), None), "float of 8 bits, inputs in 16 bits"),
        (GPTQ | {"desc_act": True}, "desc_act true"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {".*mlp.*": {"bits": 8}}}, "dynamic"),
    ],
)
def test_other_formats_are_rejected_by_name_with_a_list_of_those_that_work(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        read_quantization({"quantization_config": config})
    assert refused.value.code == "quantized_checkpoint"
    assert all(each in str(refused.value) for each in ("128 × 128", "compressed-tensors", "awq", "gptq", "bfloat16"))


def test_checkpoints_of_mlx_are_rejected_by_name() -> None:
    with pytest.raises(ModelError, match="MLX") as refused:
        read_quantization({"quantization": {"group_size": 64, "bits": 4}})
    assert refused.value.code == "quantized_checkpoint"


def test_several_or_partial_groups_are_rejected() -> None:
    config = compressed(args(8, "float", "channel"), TOKEN)
    group = config["config_groups"]["group_0"]
    for groups, says in (
        ({"group_0": group, "group_1": group}, "several"),
        ({"group_0": group | {"targets": ["re:.*mlp.*"]}}, "targets"),
    ):
        with pytest.raises(ModelError, match=says) as refused:
            read_quantization({"quantization_config": config | {"config_groups": groups}})
        assert refused.value.code == "quantized_checkpoint"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("fp8", "not an object"),
        (QWEN3_FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (compressed(args(8, "float", "channel"), TOKEN) | {"config_groups": []}, "config_groups"),
        (compressed(args(8, "float", "channel"), TOKEN) | {"config_groups": {"a": {"targets": ["Linear"]}}}, "weights"),
        (compressed(args(8, "float", "channel"), TOKEN, ignore=["re:("]), "regular expression"),
        (compressed(args(8, "float", "channel"), TOKEN, ignore=[1]), "ignore"),
        (GPTQ | {"dynamic": {"-:*.mlp": {}}}, "regular expression"),
        (GPTQ | {"modules_in_block_to_quantize": ["self_attn.k_proj"]}, "list of lists"),
        (AWQ | {"modules_to_not_convert": ["(mlp"]}, "regular expression"),
    ],
)
def test_a_malformed_quantization_is_rejected(config: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        read_quantization({"quantization_config": config})
    assert refused.value.code == "invalid_config"


def test_layers_are_ignored_by_name_part_or_expression() -> None:
    quantization = Quantization(
        format=Fp8Blocks(),
        ignored=("lm_head", "model.layers.0.mlp", "k_proj"),
        ignored_patterns=(r".*layers\.1\..*down_proj",),
    )
    ignored = [
        layer
        for layer in (
            "lm_head",
            "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.1.mlp.down_proj",
            "model.layers.10.mlp.down_proj",
            "model.layers.2.self_attn.k_proj",
            "model.layers.2.self_attn.qk_proj",
        )
        if quantization.format_of(layer) is None
    ]
    assert ignored == [
        "lm_head",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2.self_attn.k_proj",
    ]


@pytest.mark.parametrize("config", [GPTQ, AWQ])
def test_exceptions_of_gptqmodel_are_expressions(config: dict[str, Any]) -> None:
    found = read_quantization({"quantization_config": config | {"dynamic": {r"-:model\.layers\.0\.": {}}}})
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") is None
    assert found.format_of("model.layers.1.mlp.up_proj") is not None


def excepted(config: dict[str, Any]) -> list[str]:
    found = read_quantization({"quantization_config": config})
    assert found is not None
    layers = [f"model.layers.{layer}.{each}" for layer in (0, 1, 10) for each in ("self_attn.k_proj", "mlp.up_proj")]
    return [layer for layer in layers if found.format_of(layer) is None]


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("model.layers.0.", ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"]),
        ("model.layers.1", ["model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"]),
        ("model.layers.*.mlp", [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1, 10)]),
        (r"model\.layers\.(0|10)\.mlp", ["model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        ("mlp.up", []),
    ],
)
def test_layers_are_excepted_by_name_or_expression(field: str, entry: str, expected: list[str]) -> None:
    assert excepted(QWEN3_FP8 | {"modules_to_not_convert": None, field: [entry]}) == expected
    if field == "modules_to_not_convert":
        assert excepted(AWQ | {field: [entry]}) == expected


def test_only_the_named_modules_of_gptq_are_quantized() -> None:
    modules = [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj"]]
    expected = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1, 10)]
    assert excepted(GPTQ | {"modules_in_block_to_quantize": modules}) == expected


def test_weights_beside_a_quantized_kv_cache_are_not_quantized() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = compressed(args(8, "float", "channel"), None) | {"config_groups": {}, "kv_cache_scheme": scheme}
    assert read_quantization({"quantization_config": config}) is None


def test_settings_of_older_modelopt_are_refused(published_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config))
    settings = tmp_path / "hf_quant_config.json"
    settings.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert ModelConfig.read(tmp_path).quantization is None
    settings.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match="modelopt NVFP4") as refused:
        ModelConfig.read(tmp_path)
    assert refused.value.code == "quantized_checkpoint"


def test_gguf_is_refused_by_name(published_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="GGUF; supported are FP8"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published_config))
    with pytest.raises(ModelError, match="GGUF; supported are FP8"):
        stored_tensors(tmp_path)


def test_a_model_without_quantization_has_none(published_config: dict[str, Any]) -> None:
    assert ModelConfig.parse(published_config).quantization is None


@pytest.fixture
def published_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "quantization_config": None,
    }
