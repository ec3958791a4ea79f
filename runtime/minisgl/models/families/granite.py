"""Granite 3: Llama with multipliers (maximal update parametrization, arXiv:2203.03466)."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import attention, dense, norm, repeated, rope_of
from minisgl.models.fields import Fields


def granite(config: Fields) -> DecoderConfig:
    bias = config.flag("attention_bias")
    layer = LayerConfig(
        attention=attention(
            config,
            rope=rope_of(config),
            qkv_bias=bias,
            output_bias=bias,
            scale=config.number("attention_multiplier", default=1.0),
        ),
        feed_forward=dense(config, bias=config.flag("mlp_bias")),
        residual_scale=config.number("residual_multiplier", default=1.0),
    )
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        tied_embeddings=config.flag("tie_word_embeddings"),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logit_divisor=config.number("logits_scaling", default=1.0),
    )
