"""LFM2, dense and with experts: most layers have a short convolution in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import (
    DecoderConfig,
    FeedForwardConfig,
    FeedForwardNames,
    LayerConfig,
    MoeConfig,
    MoeNames,
    ShortConvolutionConfig,
    TensorNames,
)
from minisgl.models.families.common import MAX_SIZE, are_recurrent, attention, dense, experts, norm, num_layers, rope_of
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_ROPE_THETA: Final = 1e6


def lfm2(config: Fields) -> DecoderConfig:
    count = num_layers(config)
    size = config.count("block_ff_dim", default=config.count("intermediate_size", default=12288))
    if config.flag("block_auto_adjust_ff_dim", default=True):
        size = int(2 * size / 3)
        if (factor := config.number_or_null("block_ffn_dim_multiplier", default=1.0)) is not None:
            factor = min(factor, MAX_SIZE)
            step = config.count("block_multiple_of", default=256)
            size = -(-int(factor * size) // step) * step
    if not 1 <= size <= MAX_SIZE:
        raise ModelError("invalid_config", f"config.json: the feed-forward has {size} intermediate features")
    block = FeedForwardConfig(intermediate_size=size, activation="silu")
    full = range(count) if config.raw("full_attn_idxs") is None else config.layers("full_attn_idxs")
    return _family(config, [block] * count, [layer not in full for layer in range(count)])


def lfm2_moe(config: Fields) -> DecoderConfig:
    """The first layers have no experts."""
    count = num_layers(config)
    sparse = experts(
        config,
        count=config.count("num_experts", default=32),
        chosen=config.count("num_experts_per_tok", default=4),
        intermediate_size=config.count("moe_intermediate_size", default=1792),
        routing=RoutingConfig(
            scores="sigmoid",
            selection_bias=config.flag("use_expert_bias", default=True),
            renormalize=config.flag("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
    )
    first = min(count, config.count("num_dense_layers", default=2, may_be_zero=True))
    blocks: list[FeedForwardConfig | MoeConfig] = [*[dense(config)] * first, *[sparse] * (count - first)]
    return _family(config, blocks, [False] * count)


def _family(
    config: Fields, blocks: Sequence[FeedForwardConfig | MoeConfig], are_short: Sequence[bool]
) -> DecoderConfig:
    """`are_short`: whether each layer has a convolution, where the file does not say it."""
    rope = rope_of(config, {"rope_theta": config.number("rope_theta", default=_ROPE_THETA)})
    full = attention(config, rope=rope, query_key_norm="head")
    short = ShortConvolutionConfig(
        width=config.count("hidden_size"),
        kernel_size=config.count("conv_L_cache", default=3, most=64),
        bias=config.flag("conv_bias"),
    )
    feed_forward = FeedForwardNames(prefix="feed_forward", gate="w1", up="w3", down="w2")
    return DecoderConfig(
        layers=tuple(
            LayerConfig(attention=short if is_short else full, feed_forward=block)
            for is_short, block in zip(are_recurrent(config, ("conv",), are_short), blocks, strict=True)
        ),
        norm=replace(norm(config), eps=config.number("norm_eps", default=1e-5)),
        names=TensorNames(
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            attention_output="out_proj",
            attention_norm="operator_norm",
            feed_forward_norm="ffn_norm",
            last_norm="model.embedding_norm",
            feed_forward=feed_forward,
            moe=MoeNames(
                router="feed_forward.gate",
                selection_bias="feed_forward.expert_bias",
                experts="feed_forward.experts",
                gate="w1",
                up="w3",
                down="w2",
            ),
        ),
        tied_embeddings=config.flag("tie_embedding", default=config.flag("tie_word_embeddings", default=True)),
    )
