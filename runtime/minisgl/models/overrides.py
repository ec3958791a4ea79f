"""Overrides of a checkpoint's config.json, as given with `--hf-overrides`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from minisgl.errors import ModelError
from minisgl.options import closest

CONFIG_FIELDS: Final = frozenset(
    {
        *("architectures", "attention_bias", "compression_config", "decoder_sparse_step", "dtype"),
        *("dual_chunk_attention_config", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
        *("layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias", "mlp_only_layers"),
        *("moe_intermediate_size", "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok"),
        *("num_hidden_layers", "num_key_value_heads", "num_local_experts", "original_max_position_embeddings"),
        *("partial_rotary_factor", "quantization", "quantization_config", "rms_norm_eps", "rope_parameters"),
        *("rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_sliding_window"),
        *("attention_multiplier", "attention_out_bias", "attn_logit_softcapping", "embedding_multiplier"),
        *("final_logit_softcapping", "hidden_activation", "logits_scaling", "model_type", "no_rope_layer_interval"),
        *("no_rope_layers", "query_pre_attn_scalar", "residual_multiplier", "rope_local_base_freq"),
        *("attn_type_list", "first_k_dense_replace", "moe_k", "moe_layer_end_index", "moe_layer_interval"),
        *("moe_layer_start_index", "moe_norm_min", "moe_num_experts", "moe_num_shared_experts", "moe_use_aux_free"),
        *("n_group", "n_routed_experts", "n_shared_experts", "num_mtp_modules", "num_nextn_predict_layers"),
        *("qk_norm_type", "rotary_dim", "routed_scaling_factor", "scoring_func", "shared_intermediate_size"),
        *("qkv_bias", "shared_expert_intermediate_size", "topk_group", "use_qk_norm", "use_routing_bias"),
        *("sliding_window_pattern", "text_config", "use_bias", "use_bidirectional_attention", "vocab_size"),
        *("attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"),
        *("per_layer_config", "swiglu_alpha", "swiglu_limit", "top_k_experts", "use_double_wide_mlp"),
        *("add_cross_attention", "causal", "classifier_activation", "classifier_bias", "classifier_pooling"),
        *("activation_function", "global_attn_every_n_layers", "global_rope_theta", "id2label", "is_decoder"),
        *("layer_norm_eps", "layer_norm_epsilon", "local_attention", "local_rope_theta", "max_trained_positions"),
        *("mlp_fc1_bias", "mlp_fc2_bias", "moe_every_n_layers", "n_embd", "n_head", "n_inner", "n_layer"),
        *("n_positions", "norm_bias", "norm_eps", "num_labels", "num_shared_experts", "pad_token_id"),
        *("parallel_block", "position_embedding_type", "prenorm", "problem_type", "qkv_proj_bias"),
        *("rotary_emb_base", "rotary_emb_fraction", "rotary_emb_interleaved", "rotary_emb_scale_base"),
        *("sbert_ce_default_activation_function", "sentence_transformers", "type_vocab_size", "use_rms_norm"),
        *("attn_output_gate", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype"),
        *("output_gate_type", "vocab_size_per_layer_input"),
        *("attention_head_dim", "conv_kernel", "hybrid_override_pattern", "layers_block_type", "mamba_conv_bias"),
        *("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_head_dim", "mamba_hidden_act"),
        *("mamba_n_groups", "mamba_n_heads", "mamba_num_heads", "mamba_proj_bias", "mlp_hidden_act", "moe_latent_size"),
        *("moe_shared_expert_intermediate_size", "n_groups", "residual_in_fp32", "ssm_state_size", "time_step_limit"),
        *("block_auto_adjust_ff_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "conv_L_cache"),
        *("conv_bias", "full_attn_idxs", "num_dense_layers", "tie_embedding", "use_conv_bias", "use_expert_bias"),
    }
)
"""Fields of config.json that `ModelConfig.parse` and the readers of families read."""
ROPE_FIELDS: Final = frozenset(
    {
        *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale"),
        *("mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type"),
        *("alpha", "full_attention", "llama_4_scaling_beta", "long_factor", "short_factor", "sliding_attention"),
        *("truncate", "type"),
    }
)
"""Fields of the RoPE parameters that `read_rope` reads."""

_ALIASES: Final = (("dtype", "torch_dtype"), ("num_experts", "num_local_experts"))
_ROPE_OBJECTS: Final = ("rope_parameters", "rope_scaling")
_ROPE_BASE: Final = ("partial_rotary_factor", "rope_theta")
"""Parameters that do not belong to one kind of scaling."""
_ROPE_EVERYWHERE: Final = (*_ROPE_BASE, "original_max_position_embeddings")
"""Parameters that are either in the RoPE object or beside it."""


def override(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with `changes`: an object changes the fields that it names within an object, any other value
    replaces the field. Null means that the field is missing.

    The RoPE parameters are one object, called `rope_scaling` or `rope_parameters`, `rope_theta` included; a change of
    its type drops the parameters of the old type. Raises ModelError `unknown_override` for fields that the checkpoint
    does not have and that are not read.
    """
    _check_known(changes, {*config, *CONFIG_FIELDS}, "")
    result = _merge(config, {name: value for name, value in changes.items() if name not in _ROPE_OBJECTS})
    for names in _ALIASES:
        if given := [name for name in names if name in changes]:
            result |= {name: None for name in names if name not in given}
    objects = [name for name in _ROPE_OBJECTS if name in changes]
    if objects or any(name in changes for name in _ROPE_EVERYWHERE):
        _override_rope(result, config, changes, objects)
    return result


def _override_rope(
    result: dict[str, Any], config: Mapping[str, Any], changes: Mapping[str, Any], objects: list[str]
) -> None:
    """Put the changed RoPE parameters into `result`, in the one object that the checkpoint has."""
    rope: dict[str, Any] = {}
    for name in _ROPE_OBJECTS:
        rope |= _object(config.get(name), name)
    for name in objects:
        given = _object(changes[name], f"--hf-overrides: {name}")
        _check_known(given, {*rope, *ROPE_FIELDS}, f"{name}.")
        kind = given.get("rope_type") or given.get("type")
        if changes[name] is None or (kind is not None and kind != (rope.get("rope_type") or rope.get("type"))):
            rope = {field: value for field, value in rope.items() if field in _ROPE_BASE}
        elif kind is not None:
            rope = {field: value for field, value in rope.items() if field not in ("rope_type", "type")}
        rope = _merge(rope, given)
        result |= {field: None for field in _ROPE_EVERYWHERE if field in given and field not in changes}
    given_inside = {field for name in objects for field in _object(changes[name], name)}
    for field in _ROPE_EVERYWHERE:
        if field in changes and field not in given_inside:
            rope.pop(field, None)
    place = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    result |= {name: rope or None if name == place else None for name in _ROPE_OBJECTS}


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError("invalid_config", f"{name} is {value!r}, not an object")
    return value


def _check_known(changes: Iterable[str], known: set[str], path: str) -> None:
    for name in changes:
        if name not in known:
            raise ModelError(
                "unknown_override",
                f"--hf-overrides: {path}{name} is neither in config.json nor read by this version; did you mean "
                f"{path}{closest(name, known)}?",
            )
