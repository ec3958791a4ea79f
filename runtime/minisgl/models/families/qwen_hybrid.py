"""Qwen3-Next and Qwen3.5: three of four layers have linear attention (arXiv:2412.06464) in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    FeedForwardNames,
    GatedDeltaConfig,
    LayerConfig,
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
    norm,
    num_layers,
    rope_of,
)
from minisgl.models.families.qwen import mixed
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_LEFT_OUT: Final = ("mtp.", "model.visual.", "visual.")
"""Layers that predict further tokens, and the encoder of images."""
_STACKED: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def qwen3_next(config: Fields) -> DecoderConfig:
    sparse = _experts(config, renormalize=config.flag("norm_topk_prob", default=True))
    return _family(config, mixed(config, sparse), by_key_head=True, names=TensorNames(moe=_moe_names()))


def qwen3_5(config: Fields) -> DecoderConfig:
    return _family(config, [dense(config)] * num_layers(config), by_key_head=False, names=TensorNames())


def qwen3_5_moe(config: Fields) -> DecoderConfig:
    blocks = [_experts(config, renormalize=True)] * num_layers(config)
    return _family(config, blocks, by_key_head=False, names=TensorNames(moe=_moe_names()))


def qwen3_5_moe_multimodal(config: Fields) -> DecoderConfig:
    """Files in 16 bits have one tensor for all experts of a layer, quantized ones some for each expert."""
    family = qwen3_5_moe(config)
    stacked = None if config.raw("quantization_config") else _STACKED
    return replace(family, names=replace(family.names, moe=replace(family.names.moe, stacked=stacked)))


def _family(
    config: Fields,
    blocks: Sequence[FeedForwardConfig | MoeConfig],
    *,
    by_key_head: bool,
    names: TensorNames,
) -> DecoderConfig:
    config.only("output_gate_type", "silu", "swish")
    config.only("mamba_ssm_dtype", "float32")
    full, linear = _full(config), _linear(config, by_key_head=by_key_head)
    return DecoderConfig(
        layers=tuple(
            LayerConfig(attention=linear if is_linear else full, feed_forward=block)
            for is_linear, block in zip(_are_linear(config, len(blocks)), blocks, strict=True)
        ),
        norm=norm(config, unit_offset=True, round_last=True),
        names=replace(names, left_out=_LEFT_OUT),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _full(config: Fields) -> AttentionConfig:
    bias = config.flag("attention_bias")
    # For text all three positions of a token are the same: sections of RoPE rotate as one.
    rope = rope_of(config, may_be_partial=True)
    block = attention(config, rope=rope, head_dim=256, qkv_bias=bias, output_bias=bias, query_key_norm="head")
    return replace(block, output_gate=config.flag("attn_output_gate", default=True))


def _linear(config: Fields, *, by_key_head: bool) -> GatedDeltaConfig:
    keys = config.count("linear_num_key_heads", default=16, most=MAX_HEADS)
    values = config.count("linear_num_value_heads", default=32, most=MAX_HEADS)
    if values % keys:
        raise ModelError(
            "invalid_config",
            f"config.json: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}",
        )
    return GatedDeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.count("linear_key_head_dim", default=128, most=MAX_HEADS),
        value_dim=config.count("linear_value_head_dim", default=128, most=MAX_HEADS),
        kernel_size=config.count("linear_conv_kernel_dim", default=4, most=64),
        by_key_head=by_key_head,
    )


def _are_linear(config: Fields, count: int) -> list[bool]:
    """Whether each layer has linear attention: all but every fourth, or as `layer_types` lists."""
    every = config.count("full_attention_interval", default=4)
    return are_recurrent(config, ("linear_attention",), [(layer + 1) % every != 0 for layer in range(count)])


def _experts(config: Fields, *, renormalize: bool) -> MoeConfig:
    size = config.count("moe_intermediate_size", default=512)
    return experts(
        config,
        count=config.count("num_experts", default=config.count("num_local_experts", default=256)),
        chosen=config.count("num_experts_per_tok", default=8),
        intermediate_size=size,
        routing=RoutingConfig(renormalize=renormalize),
        shared_size=config.count("shared_expert_intermediate_size", default=size),
        shared_gate=True,
    )


def _moe_names() -> MoeNames:
    return MoeNames(shared=FeedForwardNames(prefix="mlp.shared_expert"))
