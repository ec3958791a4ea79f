"""Families of models: pure functions from config.json to the description of a model's layers, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from minisgl.models.decoder_config import DecoderConfig
from minisgl.models.families import (
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    minimax,
    mistral,
    olmo,
    phi,
    qwen,
    seed,
    smollm,
)
from minisgl.models.fields import Fields

FAMILIES: Final[Mapping[str, Callable[[Fields], DecoderConfig]]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": mistral.mistral,
    "Ministral3ForCausalLM": mistral.ministral3,
    "Mistral3ForConditionalGeneration": mistral.mistral3,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2MoeForCausalLM": qwen.qwen2_moe,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": qwen.qwen3_moe,
    "SmolLM3ForCausalLM": smollm.smollm3,
    "Phi3ForCausalLM": phi.phi3,
    "GraniteForCausalLM": granite.granite,
    "GraniteMoeForCausalLM": granite.granite_moe,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
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
"""Readers by the name in `architectures`."""

_MLA: Final = "multi-head latent attention (MLA)"
_ALTUP: Final = "alternating updates of several residual streams (AltUp)"
_LINEAR: Final = "linear attention with a recurrent state"

MISSING: Final[Mapping[str, str]] = {
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekV32ForCausalLM": f"{_MLA} and sparse attention",
    "Gemma3nForCausalLM": _ALTUP,
    "Gemma3nForConditionalGeneration": _ALTUP,
    "Glm4MoeLiteForCausalLM": _MLA,
    "GlmMoeDsaForCausalLM": f"{_MLA} and sparse attention",
    "KimiLinearForCausalLM": _LINEAR,
    "MiniMaxM1ForCausalLM": _LINEAR,
    "Qwen3NextForCausalLM": _LINEAR,
}
"""What known architectures need that is not there."""
