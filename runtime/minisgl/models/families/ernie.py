"""ERNIE 4.5: Llama whose RoPE turns neighbouring dimensions."""

from __future__ import annotations

import msgspec

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import attention, dense, norm, repeated, rope_of
from minisgl.models.fields import Fields


def ernie(config: Fields) -> DecoderConfig:
    bias = config.flag("use_bias")
    rope = msgspec.structs.replace(rope_of(config), interleaved=True)
    layer = LayerConfig(
        attention=attention(config, rope=rope, head_dim=128, qkv_bias=bias, output_bias=bias),
        feed_forward=dense(config, bias=bias),
    )
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )
