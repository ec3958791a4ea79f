"""Granite: Llama with multipliers (maximal update parametrization, arXiv:2203.03466), dense and with experts. In
Granite 4 most layers have a state space in place of attention."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import (
    DecoderConfig,
    FeedForwardConfig,
    FeedForwardNames,
    LayerConfig,
    Mamba2Config,
    MoeConfig,
    MoeNames,
    TensorNames,
)
from minisgl.models.families.common import (
    MAX_HEADS,
    are_recurrent,
    attention,
    dense,
    experts,
    mamba2,
    norm,
    num_layers,
    read_activation,
    repeated,
    rope_of,
)
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_EXPERTS: Final = MoeNames(
    router="block_sparse_moe.router.layer",
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)


def granite(config: Fields) -> DecoderConfig:
    return _family(config, dense(config, bias=config.flag("mlp_bias")), TensorNames(), rope_of(config))


def granite_moe(config: Fields) -> DecoderConfig:
    """Experts in all layers, those of a layer in two tensors."""
    sparse = experts(
        config,
        count=config.count("num_local_experts", default=8),
        chosen=config.count("num_experts_per_tok", default=2),
        intermediate_size=config.count("intermediate_size"),
        routing=RoutingConfig(renormalize=True),
    )
    return _family(config, sparse, TensorNames(moe=_EXPERTS), rope_of(config))


def granite_hybrid(config: Fields) -> DecoderConfig:
    """Every token also takes a shared expert, which is all of the feed-forward where there are no others."""
    config.only("position_embedding_type", "rope", "nope")
    size = config.count("shared_intermediate_size", default=1024)
    names = FeedForwardNames(prefix="shared_mlp", fused="input_linear", down="output_linear")
    count = config.count("num_local_experts", default=8, may_be_zero=True)
    feed_forward: FeedForwardConfig | MoeConfig
    if count:
        feed_forward = experts(
            config,
            count=count,
            chosen=config.count("num_experts_per_tok", default=2),
            intermediate_size=config.count("intermediate_size"),
            routing=RoutingConfig(renormalize=True),
            shared_size=size,
        )
    else:
        feed_forward = FeedForwardConfig(intermediate_size=size, activation=read_activation(config))
    rope = rope_of(config) if config.raw("position_embedding_type") == "rope" else None
    family = _family(config, feed_forward, TensorNames(feed_forward=names, moe=replace(_EXPERTS, shared=names)), rope)
    return replace(
        family,
        layers=tuple(
            replace(layer, attention=_mamba(config)) if is_recurrent else layer
            for layer, is_recurrent in zip(family.layers, _are_recurrent(config), strict=True)
        ),
    )


def _are_recurrent(config: Fields) -> list[bool]:
    return are_recurrent(config, ("mamba", "linear_attention"), [True] * num_layers(config))


def _mamba(config: Fields) -> Mamba2Config:
    config.only("hidden_act", "silu", "swish")
    width = config.count("mamba_expand", default=2) * config.count("hidden_size")
    heads = config.count("mamba_n_heads", default=128, most=MAX_HEADS)
    size = config.raw("mamba_d_head", "auto")
    if width % heads or size not in ("auto", None, width // heads):
        raise ModelError(
            "invalid_config", f"config.json: {heads} mamba_n_heads of mamba_d_head {size!r:.40} are not {width} numbers"
        )
    return mamba2(
        config,
        heads=heads,
        head_dim=width // heads,
        groups=config.count("mamba_n_groups", default=1),
        state_size=config.count("mamba_d_state", default=256, most=MAX_HEADS),
        kernel_size=config.count("mamba_d_conv", default=4, most=64),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
        projection_bias=config.flag("mamba_proj_bias"),
    )


def _family(
    config: Fields, feed_forward: FeedForwardConfig | MoeConfig, names: TensorNames, rope: RopeConfig | None
) -> DecoderConfig:
    bias = config.flag("attention_bias")
    layer = LayerConfig(
        attention=attention(
            config,
            rope=rope,
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
