"""Nomic BERT (arXiv:2402.01613): BERT with RoPE and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from minisgl.models.encoder_config import EncoderConfig, EncoderFeedForward, EncoderLayerConfig, EncoderNames
from minisgl.models.families.bert import LEFT_OUT
from minisgl.models.families.common import encoder_attention, num_layers, read_activation, rope_of
from minisgl.models.fields import Fields

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer",),
    "intermediate_size": ("n_inner",),
    "layer_norm_eps": ("layer_norm_epsilon",),
    # Up to this length the scaling of RoPE, which depends on the length of each text, does nothing.
    "max_position_embeddings": ("max_trained_positions", "n_positions"),
    "rope_theta": ("rotary_emb_base",),
}
"""Names of the files that were written for the authors' own code."""


def nomic_bert(config: Fields) -> EncoderConfig:
    for name in ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved"):
        config.only(name, False)
    for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        config.only(name, False)
    config.only("rotary_emb_fraction", 1, 1.0)
    config.only("rotary_emb_scale_base")
    config.only("activation_function", "swiglu")
    config.only("moe_every_n_layers", 0)
    config.only("num_shared_experts", 0)
    # Files of today have `rope_parameters`.
    theta = {} if config.raw("rope_parameters") else {"rope_theta": config.number("rope_theta", default=1000.0)}
    layer = EncoderLayerConfig(
        attention=encoder_attention(config, rope=rope_of(config, theta)),
        feed_forward=EncoderFeedForward(
            intermediate_size=config.count("intermediate_size"),
            activation=read_activation(config),
            is_gated=True,
            input_bias=False,
            output_bias=False,
        ),
    )
    return EncoderConfig(
        layers=(layer,) * num_layers(config),
        norms="post",
        norm_eps=config.number("layer_norm_eps", default=1e-12),
        token_types=config.count("type_vocab_size", default=2, may_be_zero=True),
        names=EncoderNames(
            embedding_norm="emb_ln",
            layers="encoder.layers",
            qkv=("attn.Wqkv",),
            attention_output="attn.out_proj",
            attention_norm="norm1",
            feed_forward_input=("mlp.fc12", "mlp.fc11"),
            feed_forward_output="mlp.fc2",
            feed_forward_norm="norm2",
            left_out=LEFT_OUT,
        ),
    )
