"""RoPE parameters of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from minisgl.errors import ModelError
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.fields import Fields

_OBJECTS: Final = ("rope_parameters", "rope_scaling")
_KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_REMEDIES: Final[Mapping[str, str]] = {
    "dynamic": "; up to max_position_embeddings it does nothing: --hf-overrides '{\"rope_scaling\": null}' removes it",
}


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`. `max_position`:
    `max_position_embeddings` of the file."""
    parameters, scaling = ({} if value is None else value for value in map(config.get, _OBJECTS))
    for value in (parameters, scaling):
        if not isinstance(value, dict):
            raise ModelError("invalid_config", f"config.json: the RoPE parameters are {value!r}, not an object")
    # With both, transformers reads rope_scaling. Keep the base beside it: instructions to add rope_scaling are older
    # than files in which rope_theta is one of rope_parameters.
    base = {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}
    given = {**base, **scaling} if scaling else parameters
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelError("unsupported_rope", "config.json: RoPE parameters that differ by layer are not supported")
    rope = Fields({"rope_theta": config.get("rope_theta"), **given})
    kind = given.get("rope_type") or given.get("type") or "default"
    # Phi-3's first files.
    kind = "longrope" if kind == "su" else kind
    beside = Fields(config).number("partial_rotary_factor", default=1.0)
    share = rope.number("partial_rotary_factor", default=beside)
    if kind not in _KINDS or not 0 < share <= 1:
        what = f"rope type {kind!r:.80}" if kind not in _KINDS else f"partial_rotary_factor {share}"
        raise ModelError(
            "unsupported_rope",
            f"config.json: {what} is not supported; supported are rotations of type {', '.join(_KINDS)}"
            f"{_REMEDIES.get(str(kind), '')}",
        )
    theta = rope.number("rope_theta", default=10000.0)
    if theta <= 0:
        raise ModelError("invalid_config", f"config.json: rope_theta is {theta}, not positive")
    if kind == "default":
        return RopeConfig(theta=theta, rotated_share=share)
    if kind == "proportional":
        stretch = rope.number("factor", default=1.0)
        return RopeConfig(kind="proportional", theta=theta, factor=stretch, rotated_share=share)
    factor = rope.number("factor", default=0.0)
    # In transformers, a value next to the RoPE parameters overrides one inside them.
    outside = config.get("original_max_position_embeddings")
    inside = rope.count("original_max_position_embeddings", default=max_position)
    original = outside if isinstance(outside, int) else inside
    if kind in ("yarn", "longrope") and not factor:
        factor = max_position / original
    if factor <= 0:
        raise ModelError("invalid_config", f"config.json: rope type {kind!r} needs a positive factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor, rotated_share=share)
    if kind == "longrope":
        return RopeConfig(
            kind="longrope",
            theta=theta,
            factor=factor,
            original_max_position=original,
            attention_factor=_longrope_attention_factor(rope, factor, original),
            short_factors=rope.factors("short_factor"),
            long_factors=rope.factors("long_factor"),
            rotated_share=share,
        )
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=factor,
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor", default=1.0),
            high_freq_factor=rope.number("high_freq_factor", default=4.0),
            rotated_share=share,
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0) or 1.0,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
        rotated_share=share,
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.number("attention_factor", default=0.0)
    if given:
        return given
    mscale, mscale_all = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _longrope_attention_factor(rope: Fields, factor: float, original: int) -> float:
    given = rope.number("attention_factor", default=0.0)
    return given or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))


def ropes_by_type(
    config: Mapping[str, Any], *, local_theta: float | None = None, theta: float = 10_000.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE parameters, as `rope_of` takes them, of layers with a window and of the others. Newer files have an object
    for each type of layer; older ones have `rope_scaling`, which is for layers without a window. `local_theta`: base of
    layers with a window in older files; None: that of the others."""
    parameters, scaling = ({} if value is None else value for value in map(config.get, _OBJECTS))
    for value in (parameters, scaling):
        if not isinstance(value, dict):
            raise ModelError("invalid_config", f"config.json: the RoPE parameters are {value!r:.80}, not an object")
    whole, local = (parameters.get(kind) for kind in ("full_attention", "sliding_attention"))
    if isinstance(whole, dict) or isinstance(local, dict):
        found = [
            {"rope_theta": default, **(each if isinstance(each, dict) else {})}
            for each, default in ((local, local_theta or theta), (whole, theta))
        ]
    else:
        base = parameters.get("rope_theta", config.get("rope_theta") or theta)
        found = [{"rope_theta": local_theta or base}, {"rope_theta": base, **scaling}]
        if parameters and not scaling:
            found[1] = {**parameters, "rope_theta": base}
    first, second = ({"rope_parameters": each, "rope_scaling": None} for each in found)
    return first, second
