"""BERT (arXiv:1810.04805), and RoBERTa (arXiv:1907.11692) with XLM-RoBERTa (arXiv:1911.02116)."""

from __future__ import annotations

from typing import Final

from minisgl.errors import ModelError
from minisgl.models.encoder_config import EncoderConfig, EncoderFeedForward, EncoderLayerConfig, EncoderNames
from minisgl.models.families.common import encoder_activation, encoder_attention, max_positions, num_layers
from minisgl.models.fields import Fields
from minisgl.models.pooling_config import HeadConfig

LEFT_OUT: Final = ("model.pooler.", "classifier.", "cls.", "lm_head.", "qa_outputs.")
"""Heads, and what is before them."""


def bert(config: Fields) -> EncoderConfig:
    return _family(config, first_position=0)


def roberta(config: Fields) -> EncoderConfig:
    """The rows of positions up to that of the padding token are not used."""
    return _family(config, first_position=config.count("pad_token_id", default=1, may_be_zero=True) + 1)


def bert_head(config: Fields) -> HeadConfig:
    return HeadConfig(output="classifier", output_bias=True, dense="model.pooler.dense")


def roberta_head(config: Fields) -> HeadConfig:
    return HeadConfig(output="classifier.out_proj", output_bias=True, dense="classifier.dense")


def _family(config: Fields, first_position: int) -> EncoderConfig:
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    positions = max_positions(config)
    if positions <= first_position:
        raise ModelError(
            "invalid_config", f"config.json: {positions} positions, of which the first {first_position} are not used"
        )
    layer = EncoderLayerConfig(
        attention=encoder_attention(config, rope=None, qkv_bias=True, output_bias=True),
        feed_forward=EncoderFeedForward(
            intermediate_size=config.count("intermediate_size"),
            activation=encoder_activation(config),
            is_gated=False,
            input_bias=True,
            output_bias=True,
        ),
    )
    return EncoderConfig(
        layers=(layer,) * num_layers(config),
        norms="post",
        norm_eps=config.number("layer_norm_eps", default=1e-12),
        positions=positions,
        first_position=first_position,
        token_types=config.count("type_vocab_size", default=2, may_be_zero=True),
        names=EncoderNames(left_out=LEFT_OUT),
    )
