"""SmolLM3: Llama with layers that know no positions."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import are_windowed, attention, dense, norm, num_layers, rope_of, window
from minisgl.models.fields import Fields


def smollm3(config: Fields) -> DecoderConfig:
    bias, rope = config.flag("attention_bias"), rope_of(config)
    feed_forward = dense(config, bias=config.flag("mlp_bias"))
    every, count = config.count("no_rope_layer_interval", default=4), num_layers(config)
    rotates = config.numbers("no_rope_layers", count, default=[(layer + 1) % every for layer in range(count)])
    size = window(config) if config.flag("use_sliding_window") else None
    windowed = are_windowed(config, [not rotated for rotated in rotates])
    layers = []
    for rotated, has_window in zip(rotates, windowed, strict=True):
        block = attention(
            config,
            rope=rope if rotated else None,
            qkv_bias=bias,
            output_bias=bias,
            window=size if has_window else None,
        )
        layers.append(LayerConfig(attention=block, feed_forward=feed_forward))
    return DecoderConfig(
        layers=tuple(layers),
        norm=norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )
