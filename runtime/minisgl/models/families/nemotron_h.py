"""Nemotron-H and Nemotron 3: a layer has one block, which is a state space, attention, a feed-forward, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    FeedForwardNames,
    LayerConfig,
    Mamba2Config,
    MoeConfig,
    MoeNames,
    TensorNames,
)
from minisgl.models.families.common import MAX_HEADS, MAX_LAYERS, attention, experts, mamba2, norm
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_Kind = Literal["mamba", "attention", "mlp", "moe"]
_KINDS: Final[Mapping[str, _Kind]] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_BLOCK: Final = "mixer"
_NAMES: Final = TensorNames(
    embedding="model.embeddings",
    attention=_BLOCK,
    mamba=_BLOCK,
    attention_norm="norm",
    feed_forward_norm="norm",
    last_norm="model.norm_f",
    feed_forward=FeedForwardNames(prefix=_BLOCK),
    moe=MoeNames(
        into_latent=f"{_BLOCK}.fc1_latent_proj",
        out_of_latent=f"{_BLOCK}.fc2_latent_proj",
        router=f"{_BLOCK}.gate",
        selection_bias=f"{_BLOCK}.gate.e_score_correction_bias",
        experts=f"{_BLOCK}.experts",
        shared=FeedForwardNames(prefix=f"{_BLOCK}.shared_experts"),
    ),
    left_out=("mtp.",),
)


def nemotron_h(config: Fields) -> DecoderConfig:
    for name in ("attention_bias", "mamba_proj_bias", "mlp_bias", "residual_in_fp32"):
        config.only(name, False)
    config.only("mlp_hidden_act", "relu2")
    config.only("mamba_hidden_act", "silu", "swish")
    kinds = _kinds(config)
    layers: dict[_Kind, LayerConfig] = {
        "mamba": LayerConfig(attention=_mamba(config), feed_forward=None),
        "attention": LayerConfig(attention=_attention(config), feed_forward=None),
        "mlp": LayerConfig(
            attention=None,
            feed_forward=FeedForwardConfig(
                intermediate_size=config.count("intermediate_size", default=21504), activation="relu2"
            ),
        ),
    }
    if "moe" in kinds:
        layers["moe"] = LayerConfig(attention=None, feed_forward=_experts(config, len(kinds)))
    return DecoderConfig(
        layers=tuple(layers[kind] for kind in kinds),
        norm=replace(norm(config, round_last=True), eps=config.number("layer_norm_epsilon", default=1e-5)),
        names=_NAMES,
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _attention(config: Fields) -> AttentionConfig:
    # The first files have another name for it.
    return attention(config, rope=None, head_dim=config.count("attention_head_dim", default=128))


def _kinds(config: Fields) -> list[_Kind]:
    """Kind of each layer: a text with a letter for each one, or a list of names."""
    written = config.raw("layers_block_type") or config.raw("layer_types") or config.raw("hybrid_override_pattern")
    if not isinstance(written, str | list) or not 1 <= len(written) <= MAX_LAYERS:
        raise ModelError(
            "invalid_config", f"config.json: hybrid_override_pattern {written!r:.80} does not list the kinds of layers"
        )
    for kind in written:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ModelError("unsupported_layer", f"config.json: a layer of type {kind!r:.40} is not supported")
    kinds = [_KINDS[kind] for kind in written]
    if "attention" not in kinds:
        raise ModelError("unsupported_layer", "config.json: no layer has full attention, which is not supported")
    count = config.raw("num_hidden_layers")
    if count is not None and count != len(written):
        raise ModelError(
            "invalid_config",
            f"config.json: num_hidden_layers is {count!r:.40}, but the list of their kinds has {len(written)}",
        )
    return kinds


def _mamba(config: Fields) -> Mamba2Config:
    return mamba2(
        config,
        heads=config.count("mamba_num_heads", default=128, most=MAX_HEADS),
        head_dim=config.count("mamba_head_dim", default=64, most=MAX_HEADS),
        groups=config.count("n_groups", default=8),
        state_size=config.count("ssm_state_size", default=128, most=MAX_HEADS),
        kernel_size=config.count("conv_kernel", default=4, most=64),
        convolution_bias=config.flag("use_conv_bias", default=True),
        projection_bias=config.flag("use_bias"),
    )


def _experts(config: Fields, layers: int) -> MoeConfig:
    for name in ("n_group", "topk_group", "n_shared_experts"):
        config.only(name, 1)
    found = experts(
        Fields({**config.all, "num_hidden_layers": layers}),
        count=config.count("n_routed_experts", default=8),
        chosen=config.count("num_experts_per_tok", default=2),
        intermediate_size=config.count("moe_intermediate_size", default=7688),
        activation="relu2",
        routing=RoutingConfig(
            scores="sigmoid",
            selection_bias=True,
            renormalize=config.flag("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", default=1.0),
            float32_router=True,
        ),
        shared_size=config.count("moe_shared_expert_intermediate_size", default=7688),
    )
    latent = config.amount("moe_latent_size")
    return replace(found, latent_size=latent or None)
