"""Qwen2 (arXiv:2407.10671), Qwen3 (arXiv:2505.09388) and their mixtures of experts."""

from __future__ import annotations

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import (
    DecoderConfig,
    FeedForwardConfig,
    FeedForwardNames,
    LayerConfig,
    MoeConfig,
    MoeNames,
    TensorNames,
)
from minisgl.models.families.common import (
    are_windowed,
    attention,
    dense,
    experts,
    norm,
    num_layers,
    rope_of,
    window,
)
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig


def qwen2(config: Fields) -> DecoderConfig:
    rope, feed_forward = rope_of(config), dense(config)
    return _family(
        config,
        [
            LayerConfig(attention=attention(config, rope=rope, qkv_bias=True, window=size), feed_forward=feed_forward)
            for size in _windows(config)
        ],
    )


def qwen2_moe(config: Fields) -> DecoderConfig:
    """Experts, and one with a gate of its own that all tokens take."""
    rope, bias = rope_of(config), config.flag("qkv_bias", default=True)
    size = window(config, default=4096) if config.flag("use_sliding_window") else None
    first = config.count("max_window_layers", default=28, may_be_zero=True)
    windowed = are_windowed(config, [layer % 2 == 0 and layer < first for layer in range(num_layers(config))])
    sparse = experts(
        config,
        count=config.count("num_experts", default=60),
        chosen=config.count("num_experts_per_tok", default=4),
        intermediate_size=config.count("moe_intermediate_size", default=1408),
        routing=RoutingConfig(renormalize=config.flag("norm_topk_prob")),
        shared_size=config.count("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    family = _family(
        config,
        [
            LayerConfig(
                attention=attention(config, rope=rope, qkv_bias=bias, window=size if has else None), feed_forward=each
            )
            for has, each in zip(windowed, mixed(config, sparse), strict=True)
        ],
    )
    return replace(family, names=TensorNames(moe=MoeNames(shared=FeedForwardNames(prefix="mlp.shared_expert"))))


def qwen3(config: Fields) -> DecoderConfig:
    rope, feed_forward, bias = rope_of(config), dense(config), config.flag("attention_bias")
    layers = []
    for size in _windows(config):
        block = attention(
            config,
            rope=rope,
            head_dim=128,
            qkv_bias=bias,
            output_bias=bias,
            query_key_norm="head",
            window=size,
        )
        layers.append(LayerConfig(attention=block, feed_forward=feed_forward))
    return _family(config, layers)


def qwen3_moe(config: Fields) -> DecoderConfig:
    bias = config.flag("attention_bias")
    size = window(config, default=4096) if config.flag("use_sliding_window") else None
    block = attention(config, rope=rope_of(config), qkv_bias=bias, output_bias=bias, query_key_norm="head", window=size)
    return _family(
        config, [LayerConfig(attention=block, feed_forward=each) for each in mixed(config, _experts(config))]
    )


def mixed(config: Fields, sparse: MoeConfig) -> list[FeedForwardConfig | MoeConfig]:
    """The feed-forward of each layer: experts, but for layers that are dense."""
    every = config.count("decoder_sparse_step", default=1)
    without = frozenset(config.layers("mlp_only_layers"))
    are_sparse = [layer not in without and (layer + 1) % every == 0 for layer in range(num_layers(config))]
    alone = sparse if all(are_sparse) else dense(config)
    return [sparse if each else alone for each in are_sparse]


def _family(config: Fields, layers: list[LayerConfig]) -> DecoderConfig:
    return DecoderConfig(layers=tuple(layers), norm=norm(config), tied_embeddings=config.flag("tie_word_embeddings"))


def _windows(config: Fields) -> list[int | None]:
    """The window of each layer: from layer `max_window_layers` on, or as `layer_types` lists."""
    count = num_layers(config)
    size = window(config, default=4096)
    if size is None or not config.flag("use_sliding_window"):
        return [None] * count
    first = config.raw("max_window_layers", 28)
    if not isinstance(first, int):
        raise ModelError("invalid_config", f"config.json: max_window_layers is {first!r:.80}, not an integer")
    return [size if has else None for has in are_windowed(config, [layer >= first for layer in range(count)])]


def _experts(config: Fields) -> MoeConfig:
    return experts(
        config,
        # transformers 5 writes the second name.
        count=config.count("num_experts", default=config.count("num_local_experts", default=128)),
        chosen=config.count("num_experts_per_tok", default=8),
        intermediate_size=config.count("moe_intermediate_size", default=768),
        routing=RoutingConfig(renormalize=config.flag("norm_topk_prob")),
    )
