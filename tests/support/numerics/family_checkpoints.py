"""Tiny checkpoints of families, made by transformers from small configurations.

Transformers initializes norms with ones and biases with zeros, which hides what a model leaves out. So all vectors and
buffers are drawn at random, and matrices are three times as large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from support.numerics.mxfp4 import in_mxfp4

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
_MINISTRAL_YARN: Final = {
    **_YARN,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SLIDING: Final = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_EXPERTS: Final = {"moe_intermediate_size": 40}
_QWEN2_MOE: Final = {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 56}
_GEMMA4: Final = {
    # Logits far enough apart for greedy tokens.
    "initializer_range": 0.04,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "layer_types": _SLIDING,
    "final_logit_softcapping": 3.0,
}
_FEW_EXPERTS: Final = {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 56}
_HYBRID: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "shared_intermediate_size": 56,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_NEMOTRON_H: Final = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    # Transformers bounds the time steps of prompts by it, but not those of answers.
    "time_step_min": 1e-9,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
}
_LFM2: Final = {"head_dim": 16, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_FACTORS: Final = {"short_factor": [1.0 + i / 6 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}

FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, windows, biases": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": _SLIDING,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi-4": ("phi3", {}),
    "phi-4-mini, window, short": (
        "phi3",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                **_FACTORS,
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "phi-4-mini, long": (
        "phi3",
        {
            "head_dim": 16,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **_FACTORS,
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granite": (
        "granite",
        {
            "attention_bias": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.02,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.0,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.02,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-5}),
    "olmo3": ("olmo3", {"sliding_window": 12, "layer_types": _SLIDING, "rope_scaling": _YARN}),
    "seed-oss": ("seed_oss", {"attention_bias": True, "tie_word_embeddings": False}),
    "exaone4": ("exaone4", {"sliding_window": 12, "sliding_window_pattern": "LLLG", "layer_types": _SLIDING}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "ernie4.5": ("ernie4_5", {"use_bias": True}),
    "ministral3": ("ministral3", {"rope_parameters": _MINISTRAL_YARN}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 12,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "swiglu_limit": 0.3,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "glm4": ("glm4", {}),
    "glm4-moe": (
        "glm4_moe",
        {
            **_EXPERTS,
            "num_experts_per_tok": 3,
            "n_routed_experts": 6,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    ),
    "glm4-moe with norms, without dense layers": (
        "glm4_moe",
        {
            **_EXPERTS,
            "num_experts_per_tok": 2,
            "n_routed_experts": 7,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "use_qk_norm": True,
        },
    ),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, **_QWEN2_MOE}),
    "qwen2-moe, windows, dense layers": (
        "qwen2_moe",
        {
            **_EXPERTS,
            **_QWEN2_MOE,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 3,
        },
    ),
    "minimax-m2": ("minimax_m2", {"num_experts_per_tok": 3, "num_local_experts": 6, "rotary_dim": 12}),
    "ernie4.5-moe": ("ernie4_5_moe", {**_EXPERTS, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2}),
    "ernie4.5-moe in every other layer": (
        "ernie4_5_moe",
        {**_EXPERTS, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_interval": 2},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "query_pre_attn_scalar": 40, "layer_types": _SLIDING}),
    "gemma4": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4, shared layers": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 700,
            "attention_bias": True,
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
        },
    ),
    "qwen3-next": ("qwen3_next", {**_EXPERTS, **_HYBRID, **_FEW_EXPERTS}),
    "qwen3-next, dense layers": (
        "qwen3_next",
        {**_EXPERTS, **_HYBRID, **_FEW_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3.5": ("qwen3_5_text", _HYBRID),
    "qwen3.5, biases": ("qwen3_5_text", {**_HYBRID, "attention_bias": True, "linear_num_value_heads": 2}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_EXPERTS, **_HYBRID, **_FEW_EXPERTS}),
    "granite4": ("granitemoehybrid", _MAMBA),
    "granite4, dense, RoPE": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2": ("lfm2", {**_LFM2, "block_multiple_of": 16, "conv_bias": True}),
    "lfm2-moe": (
        "lfm2_moe",
        {**_LFM2, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "nemotron-h": ("nemotron_h", _NEMOTRON_H),
    "nemotron-h, latent, biases": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "moe_latent_size": 32,
            "use_bias": True,
            "n_groups": 1,
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "moe", "mlp"],
        },
    ),
    "gemma4 unified": ("gemma4_unified_text", {**_GEMMA4, "num_kv_shared_layers": 0}),
}
"""Type of the model and settings beyond the sizes, by the name of a case."""


def family_config(name: str) -> dict[str, Any]:
    """config.json of a case."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, settings = FAMILIES[name]
    config: dict[str, Any] = AutoConfig.for_model(kind, **{**_SIZES, **settings}).to_dict()
    return {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}


def write_family_checkpoint(
    folder: Path, name: str, seed: int = 0, *, separate_experts: bool = False, **changes: Any
) -> Path:
    """Write the checkpoint of a case in float32; `changes` replace its settings. Returns `folder`. `separate_experts`:
    rounding to 16 bits does not change which ones a token takes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **settings, **changes}))
        randomize(model)
        if separate_experts:
            _separate_experts(model)
    model.float().save_pretrained(folder)
    return folder


def write_multimodal_checkpoint(
    folder: Path, text: Path, architecture: str, towers: Sequence[str], *, newer: bool
) -> Path:
    """Write the text model of the checkpoint `text` in the form of a multimodal one, with a tensor in each of `towers`:
    as files of today, or as those of before. Returns `folder`."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(text / "model.safetensors").items():
        inner = name.removeprefix("model.")
        is_head = name == inner
        stored = f"model.language_model.{inner}" if newer and not is_head else name
        tensors[stored if newer else f"language_model.{name}"] = tensor
    for tower in towers:
        tensors[f"model.{tower}.weight" if newer else f"{tower}.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((text / "config.json").read_text())
    whole = {"architectures": [architecture], "dtype": "float32", "vision_config": {}, "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


_TO_STREAM: Final = ("o_proj", "out_proj", "down_proj", "feed_forward.w2", "fc2_latent_proj")
"""Parts of the names of projections to the residual stream, or from an expert to what is projected there."""
_ROUTER_NORMS: Final = ("post_attention_layernorm", "ffn_norm", "norm")
"""Names of the norm whose output a router reads; a layer has one of them."""


def _separate_experts(model: Any) -> None:
    """Give each expert a direction of the residual stream that only embeddings write to, and routers alone read, in
    place. Each token has its own experts."""
    routers = [each for each in model.named_parameters() if each[0].endswith((".gate.weight", ".router.weight"))]
    if not routers:
        return
    embedding, (count, hidden) = model.get_input_embeddings().weight, routers[0][1].shape
    directions = torch.linalg.qr(torch.randn(hidden, count)).Q
    chosen = torch.rand(len(embedding), count).topk(model.config.num_experts_per_tok).indices
    strengths = torch.linspace(1.0, 0.7, chosen.shape[1]).expand(chosen.shape)
    with torch.no_grad():
        embedding.sub_(embedding @ directions @ directions.T)
        embedding.add_(torch.zeros(len(embedding), count).scatter_(1, chosen, strengths) @ directions.T)
        for name, parameter in model.named_parameters():
            if any(part in name for part in _TO_STREAM):
                if parameter.dim() == 1 or parameter.shape[-2] == hidden:
                    parameter.sub_(directions @ (directions.T @ parameter))
                elif parameter.shape[-1] == hidden:  # stored as [in, out]
                    parameter.sub_(parameter @ directions @ directions.T)
            elif name.endswith(".router.bias"):
                parameter.mul_(0.01)
        for name, router in routers:
            layer = model.model.layers[int(name.split(".")[2])]
            [norm] = [each for part in _ROUTER_NORMS if (each := getattr(layer, part, None)) is not None]
            router.copy_(directions.T / norm.weight)
        for name, vector in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                vector.mul_(0.01)


def randomize(model: torch.nn.Module) -> None:
    """Draw vectors at random and make matrices larger, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # Slow: a state that is lost shows in all tokens behind it.
                parameter.normal_(-3.0, 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
            elif parameter.dim() > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, vector in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                vector.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                vector.add_(torch.randn_like(vector) * 0.3)


def store_experts_in_mxfp4(folder: Path) -> None:
    """Quantize the experts of a gpt-oss checkpoint, to nearest, and write it as it is downloaded."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = in_mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(config))
