"""Llama (arXiv:2407.21783)."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import attention, dense, norm, repeated, rope_of
from minisgl.models.fields import Fields


def llama(config: Fields) -> DecoderConfig:
    bias = config.flag("attention_bias")
    layer = LayerConfig(
        attention=attention(config, rope=rope_of(config), qkv_bias=bias, output_bias=bias),
        feed_forward=dense(config, bias=config.flag("mlp_bias")),
    )
    return DecoderConfig(
        layers=repeated(config, layer), norm=norm(config), tied_embeddings=config.flag("tie_word_embeddings")
    )
