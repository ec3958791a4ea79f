"""Qwen2 (arXiv:2407.10671), Qwen3 and its mixture of experts (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Final

from minisgl.errors import ModelError
from minisgl.models.decoder_config import DecoderConfig, LayerConfig, MoeConfig
from minisgl.models.families.common import (
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

_MAX_EXPERTS: Final = 1 << 16
"""Experts of all layers. Together with the layers they decide how many tensors a model has."""


def qwen2(config: Fields) -> DecoderConfig:
    rope, feed_forward = rope_of(config), dense(config)
    return _family(
        config,
        [
            LayerConfig(attention=attention(config, rope=rope, qkv_bias=True, window=size), feed_forward=feed_forward)
            for size in _windows(config)
        ],
    )


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
    bias, count = config.flag("attention_bias"), num_layers(config)
    size = window(config, default=4096) if config.flag("use_sliding_window") else None
    block = attention(config, rope=rope_of(config), qkv_bias=bias, output_bias=bias, query_key_norm="head", window=size)
    experts, every = _experts(config, count), config.count("decoder_sparse_step", default=1)
    without = frozenset(config.layers("mlp_only_layers"))
    are_sparse = [layer not in without and (layer + 1) % every == 0 for layer in range(count)]
    alone = dense(config) if not all(are_sparse) else experts
    return _family(
        config, [LayerConfig(attention=block, feed_forward=experts if sparse else alone) for sparse in are_sparse]
    )


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


def _experts(config: Fields, layers: int) -> MoeConfig:
    # transformers 5 writes the second name.
    experts = config.count("num_experts", default=config.count("num_local_experts", default=128))
    if experts * layers > _MAX_EXPERTS:
        raise ModelError(
            "invalid_config",
            f"config.json: {experts} experts in each of {layers} layers; at most {_MAX_EXPERTS} in all are supported",
        )
    chosen = config.count("num_experts_per_tok", default=8)
    if chosen > experts:
        raise ModelError("invalid_config", f"config.json: {chosen} experts per token of only {experts}")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=config.count("moe_intermediate_size", default=768),
        activation=read_activation(config),
        renormalize=config.flag("norm_topk_prob"),
    )
