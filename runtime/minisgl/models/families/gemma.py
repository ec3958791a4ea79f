"""Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, LayerConfig, TensorNames
from minisgl.models.families.common import (
    IMAGES,
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
from minisgl.models.rope_fields import ropes_by_type


def gemma2(config: Fields) -> DecoderConfig:
    """Every other layer has a window; scores and logits are bounded."""
    windowed = are_windowed(config, [layer % 2 == 0 for layer in range(num_layers(config))])
    rope = rope_of(config)
    return _family(config, windowed, (rope, rope), query_key_norm=None, softcap=50.0, logit_softcap=30.0)


def gemma3(config: Fields) -> DecoderConfig:
    """Five of six layers have a window, and a RoPE of their own. In EmbeddingGemma tokens attend to later ones, too."""
    every = config.count("sliding_window_pattern", default=6)
    windowed = are_windowed(config, [(layer + 1) % every != 0 for layer in range(num_layers(config))])
    local, whole = ropes_by_type(
        config.all, local_theta=config.number("rope_local_base_freq", default=10_000.0), theta=1_000_000.0
    )
    ropes = rope_of(config, whole), rope_of(config, local)
    causal = not config.flag("use_bidirectional_attention")
    return _family(config, windowed, ropes, query_key_norm="head", causal=causal)


def gemma3_multimodal(config: Fields) -> DecoderConfig:
    """The text model of a multimodal checkpoint."""
    family = gemma3(config)
    return replace(family, names=replace(family.names, left_out=IMAGES))


def _family(
    config: Fields,
    windowed: list[bool],
    ropes: tuple[RopeConfig, RopeConfig],
    *,
    query_key_norm: Literal["head"] | None,
    softcap: float = 0.0,
    logit_softcap: float = 0.0,
    causal: bool = True,
) -> DecoderConfig:
    """`ropes`: of layers without and with a window. The two caps are defaults; 0: none."""
    bias, size = config.flag("attention_bias"), window(config, default=4096)
    if size is not None and not causal:
        # Half of it on each side.
        size = size // 2 + 1
    scale = config.number("query_pre_attn_scalar", default=256.0) ** -0.5
    cap = config.number_or_null("attn_logit_softcapping", default=softcap) or None
    feed_forward = dense(config, activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    layers = []
    for has_window in windowed:
        block = attention(
            config,
            rope=ropes[has_window],
            head_dim=256,
            qkv_bias=bias,
            output_bias=bias,
            query_key_norm=query_key_norm,
            window=size if has_window else None,
            scale=scale,
            softcap=cap,
            causal=causal,
        )
        layers.append(LayerConfig(attention=block, feed_forward=feed_forward, norms="sandwich"))
    return DecoderConfig(
        layers=tuple(layers),
        norm=norm(config, unit_offset=True, round_last=True),
        names=TensorNames(feed_forward_norm="pre_feedforward_layernorm"),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        embedding_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=config.number_or_null("final_logit_softcapping", default=logit_softcap) or None,
    )
