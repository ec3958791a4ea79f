"""ERNIE 4.5: Llama whose RoPE turns neighbouring dimensions, and its mixture of experts."""

from __future__ import annotations

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.decoder_config import DecoderConfig, LayerConfig, MoeNames, TensorNames
from minisgl.models.families.common import attention, dense, experts, norm, num_layers, repeated, rope_of
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig


def ernie(config: Fields) -> DecoderConfig:
    bias = config.flag("use_bias")
    layer = LayerConfig(
        attention=attention(config, rope=_rope(config), head_dim=128, qkv_bias=bias, output_bias=bias),
        feed_forward=dense(config, bias=bias),
    )
    return DecoderConfig(
        layers=repeated(config, layer),
        norm=norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def ernie_moe(config: Fields) -> DecoderConfig:
    # With biases the output head would have one, too.
    config.only("use_bias", False)
    size = config.count("moe_intermediate_size", default=1536)
    sparse = experts(
        config,
        count=config.count("moe_num_experts", default=64),
        chosen=config.count("moe_k", default=6),
        intermediate_size=size,
        routing=RoutingConfig(
            selection_bias=config.flag("moe_use_aux_free", default=True),
            renormalize=True,
            smallest_sum=config.number("moe_norm_min", default=1e-12),
            float32_router=True,
        ),
        shared_size=size * config.count("moe_num_shared_experts", default=2, may_be_zero=True),
    )
    are_sparse = _are_sparse(config)
    block, alone = attention(config, rope=_rope(config)), sparse if all(are_sparse) else dense(config)
    return DecoderConfig(
        layers=tuple(LayerConfig(attention=block, feed_forward=sparse if each else alone) for each in are_sparse),
        norm=norm(config, eps=1e-5),
        names=TensorNames(
            moe=MoeNames(selection_bias="mlp.moe_statics.e_score_correction_bias", selection_bias_is_row=True),
            left_out=("model.mtp_",),
        ),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _rope(config: Fields) -> RopeConfig:
    theta = config.number("rope_theta", default=500_000.0)
    return replace(rope_of(config, {"rope_theta": theta}), interleaved=True)


def _are_sparse(config: Fields) -> list[bool]:
    """Whether each layer has experts."""
    count = num_layers(config)
    first = config.count("moe_layer_start_index", default=1, may_be_zero=True)
    every, last = config.count("moe_layer_interval", default=1), config.raw("moe_layer_end_index", -1)
    if not isinstance(last, int):
        raise ModelError("invalid_config", f"config.json: moe_layer_end_index is {last!r:.80}, not an integer")
    last = count - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % every == 0 for layer in range(count)]
