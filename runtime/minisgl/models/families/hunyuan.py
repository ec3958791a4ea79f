"""Hunyuan dense: norms of queries and keys behind their rotation."""

from __future__ import annotations

import msgspec

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, LayerConfig, TensorNames
from minisgl.models.families.common import attention, dense, head_size, norm, repeated, rope_of
from minisgl.models.fields import Fields


def hunyuan_dense(config: Fields) -> DecoderConfig:
    bias = config.flag("attention_bias")
    block = attention(config, rope=_rope(config), qkv_bias=bias, output_bias=bias, query_key_norm="head")
    layer = LayerConfig(attention=msgspec.structs.replace(block, norm_after_rotation=True), feed_forward=dense(config))
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        names=TensorNames(query_norm="query_layernorm", key_norm="key_layernorm"),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _rope(config: Fields) -> RopeConfig:
    """RoPE whose base is stretched by `alpha`. Files call that `dynamic`, but it does not depend on the length."""
    given = config.raw("rope_scaling") or config.raw("rope_parameters")
    parameters = Fields(given if isinstance(given, dict) else {})
    alpha = parameters.number("alpha", default=0.0)
    if not alpha:
        return rope_of(config)
    theta = parameters.number("rope_theta", default=config.number("rope_theta", default=10_000.0))
    size = head_size(config)
    return RopeConfig(theta=theta * alpha ** (size / (size - 2)))
