"""ModernBERT (arXiv:2412.13663)."""

from __future__ import annotations

from minisgl.models.encoder_config import EncoderConfig, EncoderFeedForward, EncoderLayerConfig, EncoderNames
from minisgl.models.families.common import (
    are_windowed,
    encoder_activation,
    encoder_attention,
    num_layers,
    read_activation,
    rope_of,
)
from minisgl.models.fields import Fields
from minisgl.models.pooling_config import HeadConfig
from minisgl.models.rope_fields import ropes_by_type


def modernbert(config: Fields) -> EncoderConfig:
    """Two of three layers have a window, and a RoPE of their own; norms come before blocks."""
    every = config.count("global_attn_every_n_layers", default=3)
    windowed = are_windowed(config, [layer % every != 0 for layer in range(num_layers(config))])
    # As many on each side.
    window = config.count("local_attention", default=128) // 2 + 1
    local, whole = ropes_by_type(
        config.all,
        local_theta=config.number("local_rope_theta", default=10_000.0),
        theta=config.number("global_rope_theta", default=160_000.0),
    )
    ropes = rope_of(config, whole), rope_of(config, local)
    bias, feed_forward_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    feed_forward = EncoderFeedForward(
        intermediate_size=config.count("intermediate_size"),
        activation=read_activation(config, "hidden_activation", "gelu"),
        is_gated=True,
        input_bias=feed_forward_bias,
        output_bias=feed_forward_bias,
    )
    layers = [
        EncoderLayerConfig(
            attention=encoder_attention(
                config,
                rope=ropes[has_window],
                qkv_bias=bias,
                output_bias=bias,
                window=window if has_window else None,
            ),
            feed_forward=feed_forward,
            norms_attention=number > 0,
        )
        for number, has_window in enumerate(windowed)
    ]
    return EncoderConfig(
        layers=tuple(layers),
        norms="pre",
        norm_eps=_eps(config),
        norm_bias=config.flag("norm_bias"),
        names=EncoderNames(
            tokens="embeddings.tok_embeddings",
            embedding_norm="embeddings.norm",
            layers="layers",
            qkv=("attn.Wqkv",),
            attention_output="attn.Wo",
            attention_norm="attn_norm",
            fused_gate="mlp.Wi",
            feed_forward_output="mlp.Wo",
            feed_forward_norm="mlp_norm",
            left_out=("head.", "decoder.", "classifier."),
        ),
    )


def head(config: Fields) -> HeadConfig:
    config.only("classifier_pooling", "cls", "mean")
    return HeadConfig(
        output="classifier",
        output_bias=True,
        dense="head.dense",
        dense_bias=config.flag("classifier_bias"),
        activation=encoder_activation(config, "classifier_activation"),
        norm="head.norm",
        norm_bias=config.flag("norm_bias"),
        norm_eps=_eps(config),
        method="mean" if config.raw("classifier_pooling") == "mean" else "first",
    )


def _eps(config: Fields) -> float:
    return config.number("norm_eps", default=1e-5)
