"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471), and the dense GLM-4."""

from __future__ import annotations

from msgspec.structs import replace

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, FeedForwardNames, LayerConfig, TensorNames
from minisgl.models.families.common import (
    attention,
    dense,
    experts,
    further_layers,
    norm,
    num_layers,
    repeated,
    rope_of,
)
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig


def glm4_moe(config: Fields) -> DecoderConfig:
    """Some dense layers, then layers of experts with a shared one."""
    for field in ("n_group", "topk_group"):
        config.only(field, 1)
    size = config.count("moe_intermediate_size", default=1408)
    sparse = experts(
        config,
        count=config.count("n_routed_experts", default=config.count("num_local_experts", default=128)),
        chosen=config.count("num_experts_per_tok", default=8),
        intermediate_size=size,
        routing=RoutingConfig(
            scores="sigmoid",
            selection_bias=True,
            renormalize=config.flag("norm_topk_prob", default=True),
            smallest_sum=1e-20,
            scale=config.number("routed_scaling_factor", default=1.0),
            float32_router=True,
        ),
        shared_size=size * config.count("n_shared_experts", default=1, may_be_zero=True),
    )
    block = attention(
        config,
        rope=_rope(config),
        qkv_bias=config.flag("attention_bias"),
        query_key_norm="head" if config.flag("use_qk_norm") else None,
    )
    count, first = num_layers(config), config.count("first_k_dense_replace", default=1, may_be_zero=True)
    alone = dense(config) if first else sparse
    return DecoderConfig(
        layers=tuple(
            LayerConfig(attention=block, feed_forward=alone if layer < first else sparse) for layer in range(count)
        ),
        norm=norm(config, eps=1e-5),
        names=TensorNames(left_out=further_layers(config, "num_nextn_predict_layers")),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def glm4(config: Fields) -> DecoderConfig:
    """Norms before and behind each block; RoPE turns neighbouring dimensions."""
    layer = LayerConfig(
        attention=attention(
            config,
            rope=replace(_rope(config), interleaved=True),
            head_dim=128,
            qkv_bias=config.flag("attention_bias", default=True),
        ),
        feed_forward=dense(config),
        norms="sandwich",
    )
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config, eps=1.5625e-7),
        names=TensorNames(
            feed_forward=FeedForwardNames(fused="gate_up_proj"),
            attention_end_norm="post_self_attn_layernorm",
            feed_forward_end_norm="post_mlp_layernorm",
        ),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _rope(config: Fields) -> RopeConfig:
    share = config.number("partial_rotary_factor", default=0.5)
    return rope_of(config, {"partial_rotary_factor": share}, may_be_partial=True)
