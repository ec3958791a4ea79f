"""EXAONE 4 (arXiv:2507.11407): norms behind the blocks; layers without a window know no positions."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, LayerConfig
from minisgl.models.families.common import are_windowed, attention, dense, norm, num_layers, rope_of, window
from minisgl.models.fields import Fields


def exaone4(config: Fields) -> DecoderConfig:
    size, rope, feed_forward = window(config, default=4096), rope_of(config), dense(config)
    count, pattern = num_layers(config), config.raw("sliding_window_pattern", 4)
    every = len(pattern) if isinstance(pattern, str) else pattern or 1
    windowed = are_windowed(config, [size is not None and (layer + 1) % every != 0 for layer in range(count)])
    layers = []
    for has_window in windowed:
        block = attention(
            config,
            rope=rope if has_window or size is None else None,
            query_key_norm="head",
            window=size if has_window else None,
        )
        layers.append(LayerConfig(attention=block, feed_forward=feed_forward, norms="post"))
    return DecoderConfig(layers=tuple(layers), norm=norm(config), tied_embeddings=config.flag("tie_word_embeddings"))
