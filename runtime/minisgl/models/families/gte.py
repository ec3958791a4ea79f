"""GTE (arXiv:2407.19669): BERT with RoPE and a gated feed-forward, in the form that Transformers reads."""

from __future__ import annotations

from minisgl.models.encoder_config import EncoderConfig, EncoderFeedForward, EncoderLayerConfig, EncoderNames
from minisgl.models.families.bert import LEFT_OUT
from minisgl.models.families.common import encoder_attention, num_layers, read_activation, rope_of
from minisgl.models.fields import Fields


def gte(config: Fields) -> EncoderConfig:
    theta = {} if config.raw("rope_parameters") else {"rope_theta": config.number("rope_theta", default=160_000.0)}
    layer = EncoderLayerConfig(
        attention=encoder_attention(config, rope=rope_of(config, theta), qkv_bias=True, output_bias=True),
        feed_forward=EncoderFeedForward(
            intermediate_size=config.count("intermediate_size"),
            activation=read_activation(config, default="gelu"),
            is_gated=True,
            input_bias=False,
            output_bias=True,
        ),
    )
    return EncoderConfig(
        layers=(layer,) * num_layers(config),
        norms="post",
        norm_eps=config.number("layer_norm_eps", default=1e-12),
        token_types=config.count("type_vocab_size", default=1, may_be_zero=True),
        names=EncoderNames(
            qkv=("attention.qkv_proj",),
            attention_output="attention.o_proj",
            attention_norm="attn_ln",
            fused_gate="mlp.up_gate_proj",
            gate_is_second=True,
            feed_forward_output="mlp.down_proj",
            feed_forward_norm="mlp_ln",
            left_out=LEFT_OUT,
        ),
    )
