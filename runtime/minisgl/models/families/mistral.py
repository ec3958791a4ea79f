"""Mistral (arXiv:2310.06825), Mistral Small 3, Magistral, Devstral, Ministral 3; also in multimodal checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from minisgl.errors import ModelError
from minisgl.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, QueryGrowth, TensorNames
from minisgl.models.families.common import IMAGES, attention, dense, max_positions, norm, repeated, rope_of, window
from minisgl.models.fields import Fields


def mistral(config: Fields) -> DecoderConfig:
    return _uniform(config, window(config, default=4096))


def ministral3(config: Fields) -> DecoderConfig:
    """Mistral with YaRN, and queries that grow with the position."""
    family = _uniform(config, window(config))
    rope = config.raw("rope_parameters")
    parameters = Fields(rope if isinstance(rope, dict) else {})
    beta = parameters.number("llama_4_scaling_beta", default=0.0)
    if not beta:
        return family
    original = parameters.count("original_max_position_embeddings", default=max_positions(config))
    [layer, *_] = family.layers
    assert isinstance(layer.attention, AttentionConfig)
    growth = QueryGrowth(beta=beta, original_max_position=original)
    layer = replace(layer, attention=replace(layer.attention, query_growth=growth))
    return replace(family, layers=repeated(config, layer))


def mistral3(config: Fields) -> DecoderConfig:
    """The text model of a multimodal checkpoint."""
    kind = config.raw("model_type")
    if kind not in ("mistral", "ministral3"):
        raise ModelError(
            "unsupported_architecture",
            f"config.json: Mistral3ForConditionalGeneration with a text model of type {kind!r:.40} is not supported; "
            "supported are mistral and ministral3",
        )
    family = ministral3(config) if kind == "ministral3" else _uniform(config, window(config))
    return replace(family, names=TensorNames(left_out=IMAGES))


def _uniform(config: Fields, size: int | None) -> DecoderConfig:
    layer = LayerConfig(attention=attention(config, rope=rope_of(config), window=size), feed_forward=dense(config))
    return DecoderConfig(
        layers=repeated(config, layer), norm=norm(config), tied_embeddings=config.flag("tie_word_embeddings")
    )
