"""Names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_LANGUAGE_MODELS: Final = (("model.language_model.", "model."), ("language_model.", ""))
"""What multimodal checkpoints write before the names of their language model, and what alone those names begin with:
newer ones `model.language_model.layers…`, older ones `language_model.model.layers…` and `language_model.lm_head…`."""
_BODIES: Final = ("bert.", "roberta.", "nomic_bert.", "gte.", "new.", "backbone.")
"""What encoders with a head write before the names of their body, and a few decoders do: ours is `model.`."""
_BODY: Final = ("embed_tokens.", "embeddings.")
"""Beginnings of the names of embeddings in a checkpoint of a body alone, which has no `model.` before its names."""
_HEADS: Final = ("lm_head.", "score.", "classifier.")
_UNUSED: Final = (
    "embeddings.position_ids",
    "rotary_emb.inv_freq",
    "self_attn.q_scale",
    "self_attn.q_proj.output_scale",
    "self_attn.prob_scale",
    "self_attn.prob_output_scale",
)
"""Ends of the names of tensors that change nothing: they follow from config.json, or are for attention with queries in
FP8."""


def own_name(name: str) -> str:
    """Name of a tensor or layer of a language model, without what multimodal checkpoints write before it; names of old
    files of BERT as they are today."""
    for stored, own in _LANGUAGE_MODELS:
        if name.startswith(stored):
            return own + name.removeprefix(stored)
    for body in _BODIES:
        if name.startswith(body):
            name = f"model.{name.removeprefix(body)}"
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def own_names(names: Collection[str]) -> dict[str, str]:
    """`own_name` of each of all names of a checkpoint, which may be that of a body alone, by the stored name."""
    found = {name: own_name(name) for name in names}
    if not any(own.startswith(_BODY) for own in found.values()):
        return found
    return {name: own if own.startswith(("model.", *_HEADS)) else f"model.{own}" for name, own in found.items()}


def stored_names(name: str) -> tuple[str, ...]:
    """Names that a tensor or layer may have in a checkpoint."""
    others = [stored + name.removeprefix(own) for stored, own in _LANGUAGE_MODELS if name.startswith(own)]
    if name.startswith("model."):
        others += (body + name.removeprefix("model.") for body in _BODIES)
    return name, *others, name.removeprefix("model.")


def scale_name(name: str, shape: tuple[int, ...]) -> str:
    """`weight_scale` or `input_scale` for a tensor with one scale, which transformers names `weight_scale_inv` and
    `activation_scale`. Scales of blocks, also named `weight_scale_inv`, have two dimensions and keep their name."""
    if shape not in ((), (1,)):
        return name
    if name.endswith(".weight_scale_inv"):
        return name.removesuffix("_inv")
    return f"{name.removesuffix('activation_scale')}input_scale" if name.endswith(".activation_scale") else name


def is_unused(name: str) -> bool:
    """Whether a tensor of this name changes nothing in any model. A head that is stored although the model has tied
    embeddings equals them."""
    return name == "lm_head.weight" or name.endswith(_UNUSED)
