"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import ClampedGate, DecoderConfig, LayerConfig, MoeNames, TensorNames
from minisgl.models.families.common import are_windowed, attention, experts, norm, num_layers, rope_of, window
from minisgl.models.fields import Fields
from minisgl.moe.routing_config import RoutingConfig

_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: Fields) -> DecoderConfig:
    """Every other layer has a window, from the first on; heads have sinks, and all layers experts."""
    if config.raw("hidden_act", "silu") != "silu":
        raise ModelError(
            "unsupported_activation",
            f"config.json: hidden_act {config.raw('hidden_act')!r:.80} is not silu, on which this architecture's "
            "clamped activation is built",
        )
    layers, size, bias = num_layers(config), window(config, default=128), config.flag("attention_bias", default=True)
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        rope = rope_of(config, {"rope_theta": 150_000.0, "rope_parameters": _YARN})
    else:
        rope = rope_of(config)
    plain = experts(
        config,
        count=config.count("num_local_experts", default=128),
        chosen=config.count("num_experts_per_tok", default=4),
        intermediate_size=config.count("intermediate_size"),
        # The softmax of the chosen experts' logits is that of all logits, normalized over the chosen ones.
        routing=RoutingConfig(renormalize=True),
    )
    limit = config.number("swiglu_limit", default=7.0)
    if limit <= 0:
        raise ModelError("invalid_config", f"config.json: swiglu_limit is {limit}, not a positive number")
    feed_forward = replace(
        plain,
        activation=ClampedGate(alpha=config.number("swiglu_alpha", default=1.702), limit=limit),
        router_bias=True,
        expert_bias=True,
    )
    found = []
    for has_window in are_windowed(config, [layer % 2 == 0 for layer in range(layers)]):
        block = attention(
            config,
            rope=rope,
            head_dim=64,
            qkv_bias=bias,
            output_bias=bias,
            window=size if has_window else None,
            sinks=True,
        )
        found.append(LayerConfig(attention=block, feed_forward=feed_forward))
    return DecoderConfig(
        layers=tuple(found),
        norm=norm(config, eps=1e-5, round_last=True),
        names=TensorNames(moe=MoeNames(router="mlp.router", interleaved=True)),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )
