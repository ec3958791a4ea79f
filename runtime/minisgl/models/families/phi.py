"""Phi-3 (arXiv:2404.14219), Phi-4 (arXiv:2412.08905) and Phi-4-mini (arXiv:2503.01743)."""

from __future__ import annotations

from minisgl.models.decoder_config import DecoderConfig, FeedForwardNames, LayerConfig, TensorNames
from minisgl.models.families.common import attention, dense, norm, repeated, rope_of, window
from minisgl.models.fields import Fields


def phi3(config: Fields) -> DecoderConfig:
    rope = rope_of(config, may_be_partial=True)
    layer = LayerConfig(attention=attention(config, rope=rope, window=window(config)), feed_forward=dense(config))
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        names=TensorNames(fused_qkv="qkv_proj", feed_forward=FeedForwardNames(fused="gate_up_proj")),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )
