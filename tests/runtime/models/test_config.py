from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.parse({**LLAMA, **changes}, generation)


def rope_of(config: ModelConfig) -> RopeConfig:
    assert config.attention.rope is not None
    return config.attention.rope


def test_missing_fields_have_the_defaults_of_transformers() -> None:
    config = parse()
    assert (config.attention.head_dim, config.decoder.norm.eps, config.decoder.tied_embeddings) == (8, 1e-6, False)
    assert (rope_of(config), config.dtype) == (RopeConfig(theta=10000.0), "bfloat16")
    assert parse(num_key_value_heads=None).attention.num_kv_heads == 8
    assert not config.attention.qkv_bias
    assert parse(architectures=["Qwen2ForCausalLM"]).attention.qkv_bias
    assert parse(architectures=["Qwen3ForCausalLM"]).attention.query_key_norm == "head"
    assert parse(architectures=["Qwen3ForCausalLM"]).attention.head_dim == 128
    assert parse(architectures=["MistralForCausalLM"]).attention.window == 4096


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_dtype_has_two_spellings(spelling: str) -> None:
    assert parse(**{spelling: "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("stored", "on_cpu", "on_cuda"),
    [
        ("float32", "float32", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "float32", "float16"),
        (None, "float32", "bfloat16"),
    ],
)
def test_a_gpu_computes_in_half_precision_unless_told_otherwise(stored: str | None, on_cpu: str, on_cuda: str) -> None:
    config = parse(torch_dtype=stored)
    assert (config.dtype_on("cpu"), config.dtype_on("cuda")) == (on_cpu, on_cuda)
    assert config.dtype_on("cuda", "float32") == "float32"
    assert config.dtype_on("cpu", "bfloat16") == "bfloat16"


def test_quantized_weights_are_multiplied_in_bfloat16() -> None:
    awq = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
    config = parse(torch_dtype="float16", quantization_config=awq)
    assert (config.dtype_on("cpu"), config.dtype_on("cuda")) == ("float32", "bfloat16")
    assert config.dtype_on("cuda", "float16") == "float16"


def test_attention_bias_applies_only_to_architectures_with_it() -> None:
    for name, qkv, out in [
        ("Llama", True, True),
        ("Mistral", False, False),
        ("Qwen2", True, False),
        ("Qwen3", True, True),
    ]:
        config = parse(architectures=[f"{name}ForCausalLM"], attention_bias=True)
        assert (config.attention.qkv_bias, config.attention.output_bias) == (qkv, out), name


def test_end_tokens_of_both_files_are_used() -> None:
    config = parse({"eos_token_id": [7, 9]})
    assert config.eos_token_ids == (7, 9, 2)
    assert parse(eos_token_id=None).eos_token_ids == ()


def test_rope_parameters_and_rope_scaling_mean_the_same() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    old = parse(rope_theta=1e6, rope_scaling=scaling)
    new = parse(rope_parameters={**scaling, "rope_theta": 1e6})
    oldest = parse(rope_theta=1e6, rope_scaling={**scaling, "rope_type": None, "type": "yarn"})
    assert rope_of(old) == rope_of(new) == rope_of(oldest)
    edited = parse(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=scaling)
    assert rope_of(edited) == rope_of(old), "rope_scaling beside rope_parameters changes the scaling, not the base"
    assert rope_of(old).attention_factor == pytest.approx(1.138629)


def test_yarn_extends_the_length_of_pre_training() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse(rope_scaling=yarn).max_model_len == 16384
    assert parse(rope_scaling={**yarn, "original_max_position_embeddings": 1024}).max_model_len == 4096


@pytest.mark.parametrize(
    ("code", "changes", "says"),
    [
        ("unsupported_architecture", {"architectures": ["GPT2LMHeadModel"]}, "Qwen3MoeForCausalLM"),
        ("unsupported_architecture", {"architectures": None}, "LlamaForCausalLM"),
        ("quantized_checkpoint", {"quantization_config": {"quant_method": "gguf"}}, "gguf"),
        ("unsupported_rope", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ("invalid_config", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "short_factor"),
        (
            "invalid_config",
            {"rope_scaling": {"rope_type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1] * 4}},
            "not one for each of 4",
        ),
        ("unsupported_rope", {"partial_rotary_factor": 0.5}, "0.5"),
        ("unsupported_rope", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "layer"),
        ("unsupported_activation", {"hidden_act": "relu"}, "relu"),
        ("unsupported_dtype", {"torch_dtype": "float8_e4m3fn"}, "float8"),
        ("invalid_config", {"hidden_size": None}, "hidden_size"),
        ("invalid_config", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("invalid_config", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("invalid_config", {"num_key_value_heads": 3}, "multiple"),
        ("invalid_config", {"head_dim": 33}, "odd"),
        ("invalid_config", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("invalid_config", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("invalid_config", {"eos_token_id": [2, 2**31]}, "eos_token_id"),
        ("invalid_config", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("invalid_config", {"rope_scaling": 4.0}, "RoPE"),
        ("invalid_config", {"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
        ("invalid_config", {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "experts"),
        ("invalid_config", {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 1}, "mlp_only_layers"),
    ],
)
def test_unsupported_configurations_are_rejected_by_name(code: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as refusal:
        parse(**changes)
    assert refusal.value.code == code
    assert says in str(refusal.value)


def qwen2_window(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True, **changes}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 100}, [None, None]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [None, None]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, [100, 100]),
        (qwen2_window(use_sliding_window=False), [None, None]),
        (qwen2_window(use_sliding_window=None), [None, None]),
        (qwen2_window(), [None, None]),
        (qwen2_window(max_window_layers=2), [None, None]),
        (qwen2_window(max_window_layers=0), [100, 100]),
        (qwen2_window(max_window_layers=1), [None, 100]),
        (qwen2_window(layer_types=["full_attention", "sliding_attention"]), [None, 100]),
        (qwen2_window(layer_types=["full_attention", "full_attention"]), [None, None]),
        (qwen2_window(layer_types=["sliding_attention", "sliding_attention"]), [100, 100]),
        ({"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 100, "use_sliding_window": True}, [100, 100]),
    ],
)
def test_a_sliding_window_applies_where_transformers_applies_it(
    changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert [layer.attention.window for layer in parse(**changes).layers] == windows


def test_tensor_parallel_sizes_that_do_not_divide_are_rejected_with_those_that_do() -> None:
    config = parse(hidden_size=96, num_attention_heads=12, num_key_value_heads=4)
    for size in (1, 2, 4, 12):
        config.check_tensor_parallel(size)
    with pytest.raises(ModelError, match="one of 1, 2, 4, 12") as refusal:
        config.check_tensor_parallel(3)
    assert refusal.value.code == "tensor_does_not_divide"


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere") as refusal:
        ModelConfig.read(tmp_path / "nowhere")
    assert refusal.value.code == "model_not_found"
    with pytest.raises(ModelError) as refusal:
        ModelConfig.read(tmp_path)
    assert refusal.value.code == "config_not_found"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json") as refusal:
        ModelConfig.read(tmp_path)
    assert refusal.value.code == "malformed_json"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json") as refusal:
        ModelConfig.read(tmp_path)
    assert refusal.value.code == "malformed_json"


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, minisgl.models.config, minisgl.models.checkpoint; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
