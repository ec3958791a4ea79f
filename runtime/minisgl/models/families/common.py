"""Fields of config.json that most families share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from minisgl.errors import ModelError
from minisgl.layers.norm_config import NormConfig
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import (
    Activation,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    Mamba2Config,
    MoeConfig,
    Ungated,
)
from minisgl.models.fields import Fields
from minisgl.models.rope_fields import read_rope
from minisgl.moe.routing_config import RoutingConfig

MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1 << 14
MAX_POSITIONS: Final = 1 << 24
MAX_SIZE: Final = 2**31 - 1
"""Features of a layer."""
MAX_EXPERTS: Final = 1 << 16
"""Experts of all layers. Together with the layers they decide how many tensors a model has."""
IMAGES: Final = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Beginnings of the names of a checkpoint's tensors for images, in older and newer files."""

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


def repeated(config: Fields, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """All layers of a model whose layers are equal."""
    return (layer,) * num_layers(config)


def num_layers(config: Fields) -> int:
    return config.count("num_hidden_layers", most=MAX_LAYERS)


def attention(
    config: Fields,
    *,
    rope: RopeConfig | None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    query_key_norm: Literal["head", "projection"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    causal: bool = True,
) -> AttentionConfig:
    """Attention with the head counts of config.json. `head_dim`: default where the file has none."""
    heads = config.count("num_attention_heads", most=MAX_HEADS)
    kv_heads = config.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            "invalid_config", f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads"
        )
    size = head_size(config, head_dim)
    if rope is not None and rope.kind == "longrope":
        _check_factors(rope, size)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        query_key_norm=query_key_norm,
        rope=rope,
        window=window,
        scale=size**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
    )


def encoder_attention(
    config: Fields,
    *,
    rope: RopeConfig | None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    window: int | None = None,
) -> AttentionConfig:
    """Attention to all tokens of a text, or to those in a window around each. Each head has keys of its own."""
    of = attention(config, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, window=window, causal=False)
    if of.num_kv_heads != of.num_heads:
        raise ModelError(
            "unsupported_architecture",
            f"config.json: num_key_value_heads is {of.num_kv_heads}; supported for encoders are as many as "
            f"num_attention_heads, {of.num_heads}",
        )
    return of


def _check_factors(rope: RopeConfig, head_dim: int) -> None:
    pairs = rope.rotated_dims(head_dim) // 2
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if len(factors) != pairs:
            raise ModelError(
                "invalid_config",
                f"config.json: {name} has {len(factors)} numbers, not one for each of {pairs} rotated pairs",
            )


def head_size(config: Fields, default: int | None = None) -> int:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads", most=MAX_HEADS)
    size = config.count("head_dim", default=default or hidden // heads)
    if size % 2:
        raise ModelError("invalid_config", f"config.json: head_dim {size} is odd, RoPE rotates pairs")
    return size


def dense(config: Fields, *, bias: bool = False, activation: Activation | None = None) -> FeedForwardConfig:
    return FeedForwardConfig(
        intermediate_size=config.count("intermediate_size"),
        activation=activation or read_activation(config),
        bias=bias,
    )


def experts(
    config: Fields,
    *,
    count: int,
    chosen: int,
    intermediate_size: int,
    routing: RoutingConfig,
    activation: Ungated | None = None,
    shared_size: int = 0,
    shared_gate: bool = False,
) -> MoeConfig:
    """Mixture of `count` experts, of which each token takes `chosen`. `activation`: that of experts without
    gates. `shared_size`: intermediate size of the experts that all tokens take, together; 0: there are none."""
    layers, function = num_layers(config), activation or read_activation(config)
    if count * layers > MAX_EXPERTS:
        raise ModelError(
            "invalid_config",
            f"config.json: {count} experts in each of {layers} layers; at most {MAX_EXPERTS} in all are supported",
        )
    if chosen > count:
        raise ModelError("invalid_config", f"config.json: {chosen} experts per token of only {count}")
    shared = FeedForwardConfig(intermediate_size=shared_size, activation=function) if shared_size else None
    return MoeConfig(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=intermediate_size,
        activation=function,
        routing=routing,
        shared=shared,
        shared_gate=shared_gate,
    )


def mamba2(
    config: Fields,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    kernel_size: int,
    convolution_bias: bool,
    projection_bias: bool,
) -> Mamba2Config:
    limits = config.raw("time_step_limit")
    if limits is not None and not (
        isinstance(limits, list) and len(limits) == 2 and limits[0] == 0 and _is_infinite(limits[1])
    ):
        raise ModelError(
            "unsupported_architecture",
            f"config.json: time_step_limit is {limits!r:.80}; bounds of the time steps of Mamba-2 are not supported",
        )
    if heads % groups:
        raise ModelError(
            "invalid_config", f"config.json: {heads} heads of Mamba-2 are not a multiple of {groups} groups"
        )
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=state_size,
        kernel_size=kernel_size,
        convolution_bias=convolution_bias,
        projection_bias=projection_bias,
    )


def _is_infinite(bound: object) -> bool:
    """Whether an upper bound is infinite, in any way in which it is written."""
    value = bound.get("__float__") if isinstance(bound, dict) else bound
    return value in (None, "Infinity", "inf", math.inf)


def further_layers(config: Fields, field: str) -> tuple[str, ...]:
    """Beginnings of the names of layers behind the last one, as many as `field` says, which predict further tokens."""
    first = num_layers(config)
    count = config.count(field, default=0, most=MAX_LAYERS, may_be_zero=True)
    return tuple(f"model.layers.{first + i}." for i in range(count))


def read_activation(config: Fields, field: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.raw(field) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(
            "unsupported_activation", f"config.json: {field} {name!r:.80} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def encoder_activation(config: Fields, field: str = "hidden_act") -> Activation | Literal["relu"]:
    """That of a feed-forward or a head without a gate, which may be ReLU."""
    return "relu" if config.raw(field) == "relu" else read_activation(config, field, "gelu")


def norm(config: Fields, *, eps: float = 1e-6, unit_offset: bool = False, round_last: bool = False) -> NormConfig:
    """`eps`: default where the file has none."""
    eps = config.number("rms_norm_eps", default=eps)
    return NormConfig(eps=eps, unit_offset=unit_offset, round_last=round_last)


def rope_of(config: Fields, parameters: Mapping[str, Any] | None = None, *, may_be_partial: bool = False) -> RopeConfig:
    """RoPE of config.json, or with these parameters of one kind of layer. `may_be_partial`: the family rotates only the
    first dimensions of heads if the file says so."""
    rope = read_rope(config.all if parameters is None else {**config.all, **parameters}, max_positions(config))
    if rope.rotated_share != 1.0 and rope.kind != "proportional" and not may_be_partial:
        raise ModelError(
            "unsupported_rope",
            f"config.json: partial_rotary_factor {rope.rotated_share} is not supported for this architecture",
        )
    return rope


def max_positions(config: Fields) -> int:
    return config.count("max_position_embeddings", most=MAX_POSITIONS)


def window(config: Fields, default: int | None = None) -> int | None:
    """`sliding_window`; null means that there is none."""
    value = config.raw("sliding_window", default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            "invalid_config", f"config.json: sliding_window is {value!r:.80}, not a positive integer or null"
        )
    return value


def are_windowed(config: Fields, default: Sequence[bool]) -> list[bool]:
    """Whether each layer has a window: `layer_types`, or `default` where the file has none."""
    return are_of_type(config, ("sliding_attention",), default)


def are_recurrent(config: Fields, names: Sequence[str], default: Sequence[bool]) -> list[bool]:
    """Whether each layer has a recurrent state: `layer_types`, where such layers have one of these names, or `default`
    where the file has none."""
    found = are_of_type(config, names, default)
    if all(found):
        raise ModelError("unsupported_layer", "config.json: no layer has full attention, which is not supported")
    return found


_FULL: Final = ("full_attention", "attention")


def are_of_type(config: Fields, wanted: Sequence[str], default: Sequence[bool]) -> list[bool]:
    """Whether each layer is of one of the types `wanted`, and not of full attention: `layer_types`, or `default` where
    the file has none."""
    types = config.raw("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list) or len(types) != len(default):
        raise ModelError(
            "invalid_config", f"config.json: layer_types is {types!r:.80}, not a list of {len(default)} types"
        )
    for kind in types:
        if kind not in (*_FULL, *wanted):
            raise ModelError("unsupported_layer", f"config.json: a layer of type {kind!r:.40} is not supported")
    return [kind in wanted for kind in types]
