"""Gemma 4: heads of two sizes, layers that share keys and values, and inputs of each layer from the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    TensorNames,
    TokenInputs,
)
from minisgl.models.families.common import (
    MAX_EXPERTS,
    are_windowed,
    attention,
    dense,
    norm,
    num_layers,
    read_activation,
    rope_of,
    window,
)
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_TOWERS: Final = ("vision_tower.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.")
_TYPES: Final = ("full_attention", "sliding_attention")
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_OVERRIDES: Final = ("head_dim", "num_key_value_heads")


def gemma4(config: Fields) -> DecoderConfig:
    """Text model of E2B, E4B, 26B-A4B or 31B."""
    experts = _experts(config) if config.flag("enable_moe_block") else None
    return replace(_family(config, experts), token_inputs=_token_inputs(config))


def gemma4_unified(config: Fields) -> DecoderConfig:
    """Text model of 12B, whose layers have no inputs from tokens."""
    return _family(config)


def _family(config: Fields, experts: MoeConfig | None = None) -> DecoderConfig:
    bidirectional = config.raw("use_bidirectional_attention")
    if bidirectional not in (None, "vision"):
        raise ModelError(
            "unsupported_architecture",
            f"config.json: use_bidirectional_attention is {bidirectional!r:.40} as in embedding models; supported are "
            "null and vision, which changes nothing in texts",
        )
    count, size = num_layers(config), window(config, default=512)
    windowed = are_windowed(config, [(layer + 1) % 6 != 0 for layer in range(count)])
    # As the authors' own code does, whatever the file says.
    windowed[-1] = False
    shared = config.amount("num_kv_shared_layers")
    if shared >= count or not {*windowed[count - shared :]} <= {*windowed[: count - shared]}:
        raise ModelError(
            "invalid_config",
            f"config.json: num_kv_shared_layers is {shared}, but no layer before the last {shared} of {count} layers "
            "has keys and values for each of their types",
        )
    wide = config.flag("use_double_wide_mlp")
    feed_forward = dense(config, activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    layers = []
    for layer, has_window in enumerate(windowed):
        reuses_kv = layer >= count - shared
        block = _attention(config, layer, size if has_window else None, reuses_kv)
        part = feed_forward
        if wide and reuses_kv:
            part = replace(feed_forward, intermediate_size=2 * feed_forward.intermediate_size)
        layers.append(
            LayerConfig(
                attention=block, feed_forward=part, experts_beside=experts, norms="sandwich", scales_stream=True
            )
        )
    # Files have them for sharing layers, too.
    unread = [
        f"model.layers.{layer}.self_attn.{part}."
        for layer in range(count - shared, count)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return DecoderConfig(
        layers=tuple(layers),
        norm=norm(config, round_last=True),
        names=TensorNames(
            feed_forward_norm="pre_feedforward_layernorm",
            left_out=(*_TOWERS, *(f"model.{tower}" for tower in _TOWERS), *unread),
        ),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        embedding_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=config.number_or_null("final_logit_softcapping", default=0.0) or None,
    )


def _attention(config: Fields, layer: int, size: int | None, reuses_kv: bool) -> AttentionConfig:
    bias, key_is_value = config.flag("attention_bias"), config.flag("attention_k_eq_v") and size is None
    block = attention(
        Fields({**config.all, **_heads(config, layer, is_global=size is None)}),
        rope=_rope(config, _TYPES[size is not None]),
        head_dim=256,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm="head",
        window=size,
        scale=1.0,
    )
    return replace(block, value_norm=True, key_is_value=key_is_value, reuses_kv=reuses_kv)


def _heads(config: Fields, layer: int, *, is_global: bool) -> Mapping[str, Any]:
    """Fields of a layer's heads that differ from those of the file: layers without a window have fields of their own
    or, in files that transformers wrote, each layer has an object."""
    by_layer = config.raw("per_layer_config")
    if by_layer is not None:
        given = by_layer.get(str(layer), {}) if isinstance(by_layer, dict) else None
        if not isinstance(given, dict) or not {*given} <= {*_OVERRIDES}:
            raise ModelError(
                "invalid_config",
                f"config.json: per_layer_config is {by_layer!r:.200}; supported are objects with "
                f"{' and '.join(_OVERRIDES)} by the number of the layer",
            )
        return given
    if not is_global:
        return {}
    heads = {"head_dim": config.count("global_head_dim", default=512)}
    if config.flag("attention_k_eq_v") and config.raw("num_global_key_value_heads") is not None:
        heads["num_key_value_heads"] = config.count("num_global_key_value_heads")
    return heads


def _rope(config: Fields, kind: str) -> RopeConfig:
    given = config.raw("rope_parameters")
    by_type = _ROPES if given is None else given
    if not isinstance(by_type, Mapping) or not isinstance(by_type.get(kind), Mapping):
        raise ModelError(
            "unsupported_rope", f"config.json: rope_parameters is {given!r:.200}, without an object for {kind}"
        )
    return rope_of(config, {"rope_parameters": by_type[kind], "rope_scaling": None})


def _experts(config: Fields) -> MoeConfig:
    count, chosen = config.count("num_experts", most=MAX_EXPERTS // num_layers(config)), config.count("top_k_experts")
    if chosen > count:
        raise ModelError("invalid_config", f"config.json: {chosen} experts per token of only {count}")
    return MoeConfig(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=config.count("moe_intermediate_size"),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        routing=RoutingConfig(renormalize=True),
    )


def _token_inputs(config: Fields) -> TokenInputs | None:
    size = config.amount("hidden_size_per_layer_input", default=256)
    if not size:
        return None
    vocab_size = config.count("vocab_size_per_layer_input", default=262_144)
    if vocab_size < config.count("vocab_size"):
        raise ModelError(
            "invalid_config",
            f"config.json: vocab_size_per_layer_input {vocab_size} is less than vocab_size: tokens would lack an input",
        )
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return TokenInputs(size=size, vocab_size=vocab_size, activation=activation)
