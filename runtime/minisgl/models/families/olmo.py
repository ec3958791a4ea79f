"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (arXiv:2512.13961): norms behind the blocks, and of whole queries and keys."""

from __future__ import annotations

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import are_windowed, attention, dense, norm, num_layers, rope_of, window
from minisgl.models.fields import Fields
from minisgl.models.rope_fields import ropes_by_type


def olmo2(config: Fields) -> DecoderConfig:
    return _family(config, [(None, rope_of(config))] * num_layers(config))


def olmo3(config: Fields) -> DecoderConfig:
    """Three of four layers have a window, and RoPE that is not scaled."""
    size = window(config, default=4096)
    local, whole = ropes_by_type(config.all)
    kinds = (None, rope_of(config, whole)), (size, rope_of(config, local))
    windowed = are_windowed(config, [(layer + 1) % 4 != 0 for layer in range(num_layers(config))])
    return _family(config, [kinds[has] for has in windowed])


def _family(config: Fields, layers: list[tuple[int | None, RopeConfig]]) -> DecoderConfig:
    bias, feed_forward = config.flag("attention_bias"), dense(config)
    return DecoderConfig(
        layers=tuple(
            LayerConfig(
                attention=attention(
                    config, rope=rope, qkv_bias=bias, output_bias=bias, query_key_norm="projection", window=size
                ),
                feed_forward=feed_forward,
                norms="post",
            )
            for size, rope in layers
        ),
        norm=norm(config, round_last=True),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )
