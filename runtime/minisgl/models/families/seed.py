"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import attention, dense, norm, repeated, rope_of
from minisgl.models.fields import Fields


def seed_oss(config: Fields) -> DecoderConfig:
    layer = LayerConfig(
        attention=attention(
            config,
            rope=rope_of(config),
            head_dim=128,
            qkv_bias=config.flag("attention_bias", default=True),
            output_bias=config.flag("attention_out_bias"),
        ),
        feed_forward=dense(config, bias=config.flag("mlp_bias")),
    )
    return DecoderConfig(
        layers=repeated(config, layer), norm=norm(config), tied_embeddings=config.flag("tie_word_embeddings")
    )
