"""Names of a checkpoint's tensors."""

from __future__ import annotations

from typing import Final

_LANGUAGE_MODELS: Final = (("model.language_model.", "model."), ("language_model.", ""))
"""What multimodal checkpoints write before the names of their language model, and what alone those names begin with:
newer ones `model.language_model.layers…`, older ones `language_model.model.layers…` and `language_model.lm_head…`."""
_UNUSED: Final = (
    "rotary_emb.inv_freq",
    "self_attn.q_scale",
    "self_attn.q_proj.output_scale",
    "self_attn.prob_scale",
    "self_attn.prob_output_scale",
)
"""Ends of the names of tensors that change nothing: they follow from config.json, or are for attention with queries in
FP8."""


def own_name(name: str) -> str:
    """Name of a tensor or layer of a language model, without what multimodal checkpoints write before it."""
    for stored, own in _LANGUAGE_MODELS:
        if name.startswith(stored):
            return own + name.removeprefix(stored)
    return name


def stored_names(name: str) -> tuple[str, ...]:
    """Names that a tensor or layer may have in a checkpoint."""
    others = (stored + name.removeprefix(own) for stored, own in _LANGUAGE_MODELS if name.startswith(own))
    return name, *others


def is_unused(name: str) -> bool:
    """Whether a tensor of this name changes nothing in any model. A head that is stored although the model has tied
    embeddings equals them."""
    return name == "lm_head.weight" or name.endswith(_UNUSED)
