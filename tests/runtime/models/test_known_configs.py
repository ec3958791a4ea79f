"""The fields of published config.json files that matter to a server, and what is read from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from minisgl.config import EngineConfig
from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import MoeConfig
from minisgl.models.fit import check_fit
from minisgl.models.overrides import CONFIG_FIELDS, ROPE_FIELDS


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
MISTRAL = {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16"}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "torch_dtype": "bfloat16"}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-chat-hf": {
        **LLAMA,
        **sizes(4096, 11008, 32, 32, 32, 32000, 4096),
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eos_token_id": 2,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **LLAMA,
        **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3", **LLAMA3_ROPE},
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": [128001, 128008, 128009],
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **LLAMA,
        **sizes(2048, 8192, 16, 32, 8, 128256, 131072),
        "head_dim": 64,
        "rope_scaling": {"factor": 32.0, "rope_type": "llama3", **LLAMA3_ROPE},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": [128001, 128008, 128009],
    },
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": {
        **LLAMA,
        **sizes(4096, 14336, 32, 32, 8, 128256, 1048576),
        "rope_scaling": None,
        "rope_theta": 3580165449.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 128001,
    },
    "deepseek-ai/deepseek-coder-6.7b-instruct": {
        **LLAMA,
        **sizes(4096, 11008, 32, 32, 32, 32256, 16384),
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "eos_token_id": 32021,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **LLAMA,
        **sizes(576, 1536, 30, 9, 3, 49152, 8192),
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": {
        **LLAMA,
        **sizes(2048, 5632, 22, 32, 4, 32000, 2048),
        "torch_dtype": "float32",
        "eos_token_id": 2,
    },
    "mistralai/Mistral-7B-v0.1": {
        **MISTRAL,
        **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        **MISTRAL,
        **sizes(4096, 14336, 32, 32, 8, 32768, 32768),
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    "mistralai/Mistral-Nemo-Instruct-2407": {
        **MISTRAL,
        **sizes(5120, 14336, 40, 32, 8, 131072, 131072),
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **QWEN2,
        **sizes(896, 4864, 24, 14, 2, 151936, 32768),
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    },
    "Qwen/Qwen2.5-7B-Instruct-1M": {
        **QWEN2,
        **sizes(3584, 18944, 28, 28, 4, 152064, 1010000),
        "dual_chunk_attention_config": {
            "chunk_size": 262144,
            "local_size": 8192,
            "original_max_position_embeddings": 262144,
        },
        "max_window_layers": 28,
        "rope_theta": 10000000.0,
        "sliding_window": 32768,
        "eos_token_id": 151645,
    },
    "Qwen/Qwen3-0.6B": {
        **QWEN3,
        **sizes(1024, 3072, 28, 16, 8, 151936, 40960),
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    },
    "Qwen/Qwen3-8B, saved by transformers 5": {
        **QWEN3,
        **sizes(4096, 12288, 36, 32, 8, 151936, 40960),
        "torch_dtype": None,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 36,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        "eos_token_id": 151645,
    },
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
        **QWEN3,
        **sizes(2048, 6144, 48, 32, 4, 151936, 262144),
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "eos_token_id": 151645,
    },
}

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=5e5,
    factor=8.0,
    original_max_position=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

EXPECTED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-chat-hf": {"head_dim": 128, "dtype": "float16", "rope": RopeConfig(theta=1e4)},
    "meta-llama/Llama-3.1-8B-Instruct": {"head_dim": 128, "rope": LLAMA3, "eos_token_ids": (128001, 128008, 128009)},
    "meta-llama/Llama-3.2-1B-Instruct": {"head_dim": 64, "tied_embeddings": True, "max_model_len": 131072},
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": {
        "rope": RopeConfig(theta=3580165449.0),
        "max_model_len": 1048576,
        "tied_embeddings": False,
    },
    "deepseek-ai/deepseek-coder-6.7b-instruct": {
        "rope": RopeConfig(kind="linear", theta=1e5, factor=4.0),
        "max_model_len": 16384,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {"head_dim": 64, "tied_embeddings": True, "num_kv_heads": 3},
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": {"head_dim": 64, "dtype": "float32"},
    "mistralai/Mistral-7B-v0.1": {"window": 4096, "max_model_len": 32768},
    "mistralai/Mistral-7B-Instruct-v0.3": {"window": None, "rope": RopeConfig(theta=1e6)},
    "mistralai/Mistral-Nemo-Instruct-2407": {"head_dim": 128, "qkv_bias": False, "max_model_len": 131072},
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "head_dim": 64,
        "qkv_bias": True,
        "output_bias": False,
        "tied_embeddings": True,
        "window": None,
    },
    "Qwen/Qwen2.5-7B-Instruct-1M": {"dual_chunk_after": 262144, "window": None},
    "Qwen/Qwen3-0.6B": {"head_dim": 128, "query_key_norm": "head", "qkv_bias": False, "max_model_len": 40960},
    "Qwen/Qwen3-8B, saved by transformers 5": {
        "dtype": "bfloat16",
        "rope": RopeConfig(theta=1e6),
        "window": None,
        "tied_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {"head_dim": 128, "rope": RopeConfig(theta=1e7), "window": None},
}


def described(config: ModelConfig) -> dict[str, Any]:
    """All that is read, and what is the same in all layers beside it."""
    [attention] = {layer.attention for layer in config.layers}
    parts = (attention, config.decoder, config)
    fields = {name: getattr(part, name) for part in parts for name in part.__struct_fields__}
    return {**fields, "max_model_len": config.max_model_len}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_are_read(name: str) -> None:
    given, config = CONFIGS[name], ModelConfig.parse(CONFIGS[name])
    found = described(config)
    assert {field: found[field] for field in EXPECTED[name]} == EXPECTED[name]
    assert config.hidden_size == given["hidden_size"]
    assert (found["num_heads"], found["num_kv_heads"]) == (given["num_attention_heads"], given["num_key_value_heads"])
    assert config.vocab_size == given["vocab_size"]
    assert (config.moe is not None) == ("num_experts" in given)
    if "dual_chunk_attention_config" not in given:
        config.check_length(config.max_model_len)


MIXTURES: dict[str, dict[str, Any]] = {
    "zai-org/GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"],
        **sizes(4096, 10944, 46, 96, 8, 151552, 131072),
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
    },
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **sizes(2048, 5632, 24, 16, 16, 151936, 8192),
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "ibm-granite/granite-3.1-3b-a800m-instruct": {
        "architectures": ["GraniteMoeForCausalLM"],
        **sizes(1536, 512, 32, 24, 8, 49155, 131072),
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 40,
        "residual_multiplier": 0.22,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "MiniMaxAI/MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        **sizes(3072, 1536, 62, 48, 8, 200064, 196608),
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **sizes(2560, 12288, 28, 20, 4, 103424, 131072),
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_bias": False,
    },
}


@pytest.mark.parametrize(
    ("name", "billions", "experts", "dense_layers", "rotated"),
    [
        ("zai-org/GLM-4.5-Air", 106.9, (128, 8, 1408, 1408), 1, 64),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", 14.3, (60, 4, 1408, 5632), 0, 128),
        ("ibm-granite/granite-3.1-3b-a800m-instruct", 3.3, (40, 8, 512, None), 0, 64),
        ("MiniMaxAI/MiniMax-M2", 228.7, (256, 8, 1536, None), 0, 64),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.8, (64, 6, 1536, 3072), 1, 128),
    ],
)
def test_published_mixtures_of_experts_are_read(
    name: str, billions: float, experts: tuple[int, int, int, int | None], dense_layers: int, rotated: int
) -> None:
    config = ModelConfig.parse(MIXTURES[name])
    moe, rope = config.moe, config.attention.rope
    assert moe is not None
    assert rope is not None
    shared = None if moe.shared is None else moe.shared.intermediate_size
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, shared) == experts
    assert sum(not isinstance(layer.feed_forward, MoeConfig) for layer in config.layers) == dense_layers
    assert rope.rotated_dims(config.attention.head_dim) == rotated
    assert checkpoint_parameters(config).num_elements / 1e9 == pytest.approx(billions, abs=0.06)


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        **sizes(2048, 5120, 48, 16, 2, 151936, 262144),
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen/Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {},
        "text_config": {
            **sizes(4096, 12288, 32, 16, 4, 248320, 262144),
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e7,
                "rope_type": "default",
            },
        },
    },
    "ibm-granite/granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **sizes(1536, 512, 40, 12, 4, 100352, 131072),
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "num_experts_per_tok": 6,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
    },
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "architectures": ["NemotronHForCausalLM"],
        **sizes(2688, 1856, 52, 32, 2, 131072, 262144),
        "head_dim": 128,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_groups": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 128,
        "time_step_limit": [0.0, float("inf")],
    },
    "LiquidAI/LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        **sizes(2048, 12288, 16, 32, 8, 65536, 128000),
        "block_ff_dim": 12288,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "LiquidAI/LFM2-8B-A1B": {
        "architectures": ["Lfm2MoeForCausalLM"],
        **sizes(2048, 7168, 24, 32, 8, 65536, 128000),
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "state_mib"),
    # Parameters as transformers counts them in models of this shape; layers with states, and with keys and values.
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_391_296, (36, 12), 73.7),
        ("Qwen/Qwen3.5-9B", 8_953_803_264, (24, 8), 49.1),
        ("ibm-granite/granite-4.0-h-tiny", 6_939_037_248, (36, 4), 54.7),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_940_288, (23, 6), 46.8),
        ("LiquidAI/LFM2-1.2B", 1_170_340_608, (10, 6), 0.08),
        ("LiquidAI/LFM2-8B-A1B", 8_339_930_560, (18, 6), 0.14),
    ],
)
def test_published_hybrids_are_read(name: str, parameters: int, layers: tuple[int, int], state_mib: float) -> None:
    config = ModelConfig.parse(HYBRIDS[name])
    assert (len(config.recurrences), len(config.attentions)) == layers
    assert checkpoint_parameters(config).num_elements == parameters
    states = sum(of.num_bytes(number_bytes=2) for of in config.state_shapes())
    assert states / 2**20 == pytest.approx(state_mib, abs=0.06)


@pytest.mark.parametrize(
    ("name", "changes", "code", "says"),
    [
        ("Nemotron-3-Nano", {"n_group": 8}, "unsupported_architecture", "n_group is 8"),
        ("Nemotron-3-Nano", {"mlp_hidden_act": "silu"}, "unsupported_architecture", "mlp_hidden_act"),
        ("Nemotron-3-Nano", {"hybrid_override_pattern": "MEX*"}, "unsupported_layer", "of type 'X'"),
        ("Nemotron-3-Nano", {"hybrid_override_pattern": "MEME"}, "unsupported_layer", "no layer has full attention"),
        ("Nemotron-3-Nano", {"time_step_limit": [0.0, 0.1]}, "unsupported_architecture", "time_step_limit"),
        ("Nemotron-3-Nano", {"time_step_limit": [0.1, float("inf")]}, "unsupported_architecture", "time_step_limit"),
        ("Nemotron-3-Nano", {"n_groups": 7}, "invalid_config", "64 heads of Mamba-2"),
        ("Nemotron-3-Nano", {"num_hidden_layers": 3}, "invalid_config", "the list of their kinds has 52"),
        ("granite-4.0-h-tiny", {"mamba_n_heads": 47}, "invalid_config", "47 mamba_n_heads"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 40}, "unsupported_layer", "no layer has full attention"),
        ("LFM2-1.2B", {"full_attn_idxs": [99]}, "unsupported_layer", "no layer has full attention"),
        ("LFM2-1.2B", {"full_attn_idxs": []}, "unsupported_layer", "no layer has full attention"),
        ("LFM2-1.2B", {"block_ffn_dim_multiplier": -1.0}, "invalid_config", "intermediate features"),
        ("LFM2-1.2B", {"block_ffn_dim_multiplier": 1e300}, "invalid_config", "intermediate features"),
        ("LFM2-1.2B", {"block_ff_dim": 1}, "invalid_config", "0 intermediate features"),
    ],
)
def test_hybrids_that_are_not_supported_are_refused_by_what_is_missing(
    name: str, changes: dict[str, Any], code: str, says: str
) -> None:
    [config] = [config for each, config in HYBRIDS.items() if name in each]
    with pytest.raises(ModelError, match=says) as refused:
        ModelConfig.parse({**config, **changes})
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("zai-org/GLM-4.5-Air", {"architectures": ["Glm4MoeLiteForCausalLM"]}, "multi-head latent attention"),
        ("zai-org/GLM-4.5-Air", {"architectures": ["DeepseekV3ForCausalLM"]}, "multi-head latent attention"),
        ("zai-org/GLM-4.5-Air", {"n_group": 8, "topk_group": 4}, "n_group is 8"),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [0, 1] * 31}, "attn_type_list"),
        ("MiniMaxAI/MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("MiniMaxAI/MiniMax-M2", {"shared_intermediate_size": 512}, "shared_intermediate_size is 512"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"use_bias": True}, "use_bias is True"),
    ],
)
def test_mixtures_that_are_not_supported_are_refused_by_what_is_missing(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        ModelConfig.parse({**MIXTURES[name], **changes})
    assert refused.value.code == "unsupported_architecture"


def test_first_files_of_nemotron_h_name_the_size_of_heads_otherwise() -> None:
    config = HYBRIDS["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"] | {"hidden_size": 3072, "head_dim": None}
    assert ModelConfig.parse({**config, "attention_head_dim": 128}).attention.head_dim == 128


def test_layers_that_are_not_quantized_are_found_by_their_names_in_the_checkpoint() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignored = ["lm_head", "backbone.layers.0.mixer.in_proj", "re:backbone.layers.5.mixer.*"]
    quantized = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
    config = HYBRIDS["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"] | {"quantization_config": quantized}
    quantization = ModelConfig.parse(config).quantization
    assert quantization is not None
    assert quantization.format_of("model.layers.0.mixer.in_proj") is None
    assert quantization.format_of("model.layers.5.mixer.q_proj") is None
    assert quantization.format_of("model.layers.2.mixer.in_proj") is not None


def test_yarn_as_its_authors_document_it_extends_qwen() -> None:
    """From the model cards of Qwen2.5 and Qwen3, in both spellings."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    for name, kind in (("Qwen/Qwen2.5-0.5B-Instruct", "type"), ("Qwen/Qwen3-0.6B", "rope_type")):
        config = ModelConfig.parse(CONFIGS[name], overrides={"rope_scaling": {**yarn, kind: "yarn"}})
        rope = config.attention.rope
        assert rope is not None
        assert (rope.kind, rope.theta, config.max_model_len) == ("yarn", 1e6, 131072)
        assert rope.attention_factor == pytest.approx(1.138629)


def test_a_model_with_dual_chunk_attention_is_limited_to_plain_attention() -> None:
    config = ModelConfig.parse(CONFIGS["Qwen/Qwen2.5-7B-Instruct-1M"])
    engine = EngineConfig(model="", tensor_parallel=4)
    check_fit(config, replace(engine, max_model_len=262144), None)
    with pytest.raises(ModelError, match="--max-model-len 262144 or less") as refused:
        check_fit(config, engine, None)
    assert refused.value.code == "dual_chunk_attention"


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"quantization_config": {"bits": 4, "quant_method": "awq"}}, "quantized_checkpoint", "groups of None"),
        ({"quantization_config": {"fmt": "e4m3", "quant_method": "fp8"}}, "quantized_checkpoint", "fp8"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "invalid_config",
            "one for each of 32 rotated pairs",
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
            "invalid_config",
            "short_factor",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "unsupported_rope",
            '--hf-overrides .*"rope_scaling": null',
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "unsupported_rope", "mrope"),
    ],
)
def test_published_variants_that_are_not_supported_are_rejected(changes: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        ModelConfig.parse({**CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"], **changes})
    assert refused.value.code == code


WRONG = (True, False, 0, -1, 1, 1.5, math.inf, math.nan, 10**30, "", "x", [], [1], ["x"], [None], {}, {"a": {}}, [{}])


@pytest.mark.parametrize("name", [*CONFIGS, *MIXTURES])
def test_a_wrong_value_is_read_or_rejected_with_a_code(name: str) -> None:
    given = {**CONFIGS, **MIXTURES}[name]
    for field in CONFIG_FIELDS:
        for value in (None, *WRONG):
            _parse_or_reject({**given, field: value})
    for field in ROPE_FIELDS:
        for kind in ("default", "linear", "llama3", "yarn"):
            for value in (None, *WRONG):
                rope = {"rope_type": kind, "factor": 2.0, field: value}
                _parse_or_reject({**given, "rope_parameters": None, "rope_scaling": rope})


def _parse_or_reject(config: dict[str, Any]) -> None:
    try:
        parsed = ModelConfig.parse(config)
    except ModelError:
        return
    assert parsed.max_model_len >= 1
