"""An encoder as data: a transformer whose tokens attend to all others of their text, whatever family it belongs to."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.models.decoder_config import Activation, AttentionConfig


class EncoderFeedForward(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward of a layer."""

    intermediate_size: int
    activation: Activation | Literal["relu"]
    is_gated: bool
    """Multiply the activation of one projection with another one; else there is only one."""
    input_bias: bool
    output_bias: bool


class EncoderLayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: attention, then feed-forward, each added to the residual stream."""

    attention: AttentionConfig
    feed_forward: EncoderFeedForward
    norms_attention: bool = True
    """With norms before blocks: there is one before the attention. ModernBERT's first layer has none."""


class EncoderNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a checkpoint's tensors, behind `model.`; those of a layer also behind `layers` and its number."""

    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """One name: a tensor with the rows of all three."""
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    feed_forward_input: tuple[str, ...] = ("intermediate.dense",)
    """Projections to the intermediate size, if gated first that with the activation."""
    fused_gate: str | None = None
    """Instead of these, a tensor with the rows of both."""
    gate_is_second: bool = False
    """The rows of the projection with the activation come second in it."""
    feed_forward_output: str = "output.dense"
    feed_forward_norm: str = "output.LayerNorm"
    final_norm: str = "final_norm"
    left_out: tuple[str, ...] = ()
    """Beginnings of the whole names of tensors that are not read unless a head reads them."""


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder: what the reader of a family returns."""

    layers: tuple[EncoderLayerConfig, ...]
    norms: Literal["post", "pre"]
    """Norms of the residual stream behind each block, as in BERT, or before it and behind the last layer."""
    norm_eps: float
    norm_bias: bool = True
    positions: int = 0
    """Rows of the table of learned positions; 0: there is none."""
    first_position: int = 0
    """Row of a text's first token."""
    token_types: int = 0
    """Rows of the table of token types; 0: there is none."""
    names: EncoderNames = EncoderNames()
