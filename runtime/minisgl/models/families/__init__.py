"""Families of models: pure functions from config.json to the description of a model's layers, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from minisgl.models.decoder_config import DecoderConfig
from minisgl.models.encoder_config import EncoderConfig
from minisgl.models.families import (
    bert,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    gte,
    hunyuan,
    lfm2,
    llama,
    minimax,
    mistral,
    modernbert,
    nemotron_h,
    nomic_bert,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    seed,
    smollm,
)
from minisgl.models.fields import Fields
from minisgl.models.pooling_config import HeadConfig


class Family(NamedTuple):
    read: Callable[[Fields], DecoderConfig | EncoderConfig]
    has_lm_head: bool = False
    head: Callable[[Fields], HeadConfig] | None = None
    """Reader of the head for scores or classes."""
    aliases: Mapping[str, tuple[str, ...]] = {}
    """Names that a field may also have, the first one that is there counts."""


FAMILIES: Final[Mapping[str, Callable[[Fields], DecoderConfig]]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": mistral.mistral,
    "Ministral3ForCausalLM": mistral.ministral3,
    "Mistral3ForConditionalGeneration": mistral.mistral3,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2MoeForCausalLM": qwen.qwen2_moe,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": qwen.qwen3_moe,
    "Qwen3NextForCausalLM": qwen_hybrid.qwen3_next,
    "Qwen3_5ForCausalLM": qwen_hybrid.qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen_hybrid.qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen_hybrid.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen_hybrid.qwen3_5_moe_multimodal,
    "SmolLM3ForCausalLM": smollm.smollm3,
    "Phi3ForCausalLM": phi.phi3,
    "GraniteForCausalLM": granite.granite,
    "GraniteMoeForCausalLM": granite.granite_moe,
    "GraniteMoeHybridForCausalLM": granite.granite_hybrid,
    "Lfm2ForCausalLM": lfm2.lfm2,
    "Lfm2MoeForCausalLM": lfm2.lfm2_moe,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "NemotronHForCausalLM": nemotron_h.nemotron_h,
    "SeedOssForCausalLM": seed.seed_oss,
    "Exaone4ForCausalLM": exaone.exaone4,
    "HunYuanDenseV1ForCausalLM": hunyuan.hunyuan_dense,
    "Ernie4_5ForCausalLM": ernie.ernie,
    "GptOssForCausalLM": gpt_oss.gpt_oss,
    "Ernie4_5_MoeForCausalLM": ernie.ernie_moe,
    "Glm4ForCausalLM": glm.glm4,
    "Glm4MoeForCausalLM": glm.glm4_moe,
    "MiniMaxM2ForCausalLM": minimax.minimax_m2,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma3ForConditionalGeneration": gemma.gemma3_multimodal,
    "Gemma4ForCausalLM": gemma4.gemma4,
    "Gemma4ForConditionalGeneration": gemma4.gemma4,
    "Gemma4UnifiedForCausalLM": gemma4.gemma4_unified,
    "Gemma4UnifiedForConditionalGeneration": gemma4.gemma4_unified,
}
"""Readers of models that generate text, by the name in `architectures`."""

_HEADS: Final[Mapping[str, tuple[Callable[[Fields], EncoderConfig], Callable[[Fields], HeadConfig]]]] = {
    "Bert": (bert.bert, bert.bert_head),
    "Roberta": (bert.roberta, bert.roberta_head),
    "XLMRoberta": (bert.roberta, bert.roberta_head),
    "ModernBert": (modernbert.modernbert, modernbert.head),
    "NomicBert": (nomic_bert.nomic_bert, bert.bert_head),
    "Gte": (gte.gte, bert.bert_head),
}
ENCODERS: Final[Mapping[str, Family]] = {
    f"{name}{kind}": Family(
        read,
        head=head if kind == "ForSequenceClassification" else None,
        aliases=nomic_bert.ALIASES if name == "NomicBert" else {},
    )
    for name, (read, head) in _HEADS.items()
    for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
"""Encoders by the name in `architectures`: alone, with a head that predicts masked tokens, which is left out, or with
one for scores or classes."""

_DECODERS: Final[Mapping[str, str]] = {
    **{name.removesuffix("ForCausalLM"): name for name in FAMILIES if name.endswith("ForCausalLM")},
    "Gemma3Text": "Gemma3ForCausalLM",
}
_MULTIMODAL: Final = ("Gemma3", "Gemma4", "Gemma4Unified")
"""Without a head these are names of models that also read images."""


def family_of(architecture: str) -> Family | None:
    """Family of a supported architecture: also of decoders without a head, or with one for scores or classes in its
    place."""
    if architecture in FAMILIES:
        return Family(FAMILIES[architecture], has_lm_head=True)
    if architecture in ENCODERS:
        return ENCODERS[architecture]
    for kind in ("Model", "ForSequenceClassification"):
        name = architecture.removesuffix(kind)
        if name != architecture and name in _DECODERS and name not in _MULTIMODAL:
            head = None if kind == "Model" else _decoder_head
            return Family(partial(_without_lm_head, FAMILIES[_DECODERS[name]]), head=head)
    return None


def _without_lm_head(read: Callable[[Fields], DecoderConfig], config: Fields) -> DecoderConfig:
    family = read(config)
    return replace(family, names=replace(family.names, left_out=(*family.names.left_out, "score.")))


def _decoder_head(config: Fields) -> HeadConfig:
    return HeadConfig(output="score", output_bias=False, method="last")


_MLA: Final = "multi-head latent attention (MLA)"
_ALTUP: Final = "alternating updates of several residual streams (AltUp)"
_LINEAR: Final = "linear attention with a recurrent state"

_OWN_CODE: Final = "its own code, unless a copy with the names of Transformers (GteModel) is taken"

MISSING: Final[Mapping[str, str]] = {
    "DFlashDraftModel": "the model that it drafts for (that model's --draft-model)",
    "NewModel": _OWN_CODE,
    "NewForSequenceClassification": _OWN_CODE,
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekV32ForCausalLM": f"{_MLA} and sparse attention",
    "Gemma3nForCausalLM": _ALTUP,
    "Gemma3nForConditionalGeneration": _ALTUP,
    "Glm4MoeLiteForCausalLM": _MLA,
    "GlmMoeDsaForCausalLM": f"{_MLA} and sparse attention",
    "KimiLinearForCausalLM": _LINEAR,
    "MiniMaxM1ForCausalLM": _LINEAR,
}
"""What known architectures need that is not there."""
