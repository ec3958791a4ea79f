"""Granite 3, dense and with experts: Llama with multipliers (maximal update parametrization, arXiv:2203.03466)."""

from __future__ import annotations

from minisgl.models.decoder_config import (
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MoeConfig,
    MoeNames,
    TensorNames,
)
from minisgl.models.families.common import attention, dense, experts, norm, repeated, rope_of
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig


def granite(config: Fields) -> DecoderConfig:
    return _family(config, dense(config, bias=config.flag("mlp_bias")), TensorNames())


def granite_moe(config: Fields) -> DecoderConfig:
    """Experts in all layers, those of a layer in two tensors."""
    sparse = experts(
        config,
        count=config.count("num_local_experts", default=8),
        chosen=config.count("num_experts_per_tok", default=2),
        intermediate_size=config.count("intermediate_size"),
        routing=RoutingConfig(renormalize=True),
    )
    block = "block_sparse_moe"
    stacked = f"{block}.input_linear.weight", f"{block}.output_linear.weight"
    return _family(config, sparse, TensorNames(moe=MoeNames(router=f"{block}.router.layer", stacked=stacked)))


def _family(config: Fields, feed_forward: FeedForwardConfig | MoeConfig, names: TensorNames) -> DecoderConfig:
    bias = config.flag("attention_bias")
    layer = LayerConfig(
        attention=attention(
            config,
            rope=rope_of(config),
            qkv_bias=bias,
            output_bias=bias,
            scale=config.number("attention_multiplier", default=1.0),
        ),
        feed_forward=feed_forward,
        residual_scale=config.number("residual_multiplier", default=1.0),
    )
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        names=names,
        tied_embeddings=config.flag("tie_word_embeddings"),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logit_divisor=config.number("logits_scaling", default=1.0),
    )
