"""MiniMax M2: experts in all layers, and norms of whole queries and keys, of which half the dimensions rotate."""

from __future__ import annotations

from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, LayerConfig, MoeNames, TensorNames
from minisgl.models.families.common import (
    attention,
    experts,
    further_layers,
    head_size,
    norm,
    num_layers,
    repeated,
    rope_of,
)
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig


def minimax_m2(config: Fields) -> DecoderConfig:
    config.only("attn_type_list", [1] * num_layers(config))
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("shared_intermediate_size", 0)
    layer = LayerConfig(
        attention=attention(config, rope=_rope(config), head_dim=128, query_key_norm="projection"),
        feed_forward=experts(
            config,
            count=config.count("num_local_experts", default=256),
            chosen=config.count("num_experts_per_tok", default=8),
            intermediate_size=config.count("intermediate_size", default=1536),
            routing=RoutingConfig(scores="sigmoid", selection_bias=True, renormalize=True, float32_router=True),
        ),
    )
    block = "block_sparse_moe"
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        names=TensorNames(
            moe=MoeNames(
                router=f"{block}.gate",
                selection_bias=f"{block}.e_score_correction_bias",
                experts=f"{block}.experts",
                gate="w1",
                up="w3",
                down="w2",
            ),
            left_out=further_layers(config, "num_mtp_modules"),
        ),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _rope(config: Fields) -> RopeConfig:
    share, theta = config.number("partial_rotary_factor", default=1.0), config.number("rope_theta", default=5_000_000.0)
    if config.raw("rotary_dim") is not None:
        share = config.count("rotary_dim") / head_size(config, 128)
    return rope_of(config, {"partial_rotary_factor": share, "rope_theta": theta}, may_be_partial=True)
