"""Tiny checkpoints with random weights and all files of a real one, written in a second.

Greedy sampling has a margin: the weights keep activations at unit variance, so that the median gap between the two
largest logits is large compared to the rounding of bfloat16. About one token in some thousand still has a small gap;
tests that compare tokens across devices check the gap first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from minisgl.errors import ModelError
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import MoeConfig
from minisgl.models.random_weights import random_tensor
from minisgl.toy.quantize import QUANTIZATION_CONFIGS, quantize
from minisgl.toy.tiny_tokenizer import FAMILIES, Family, is_lone_byte, train_tokenizer

TinyRope = Literal["default", "linear", "llama3", "yarn"]

_LOGIT_SCALE: Final = 2.0
"""Standard deviation of the logits: sampling at temperature 1 then prefers some tokens, as in trained models."""
_EMBEDDING_SCALE: Final = 0.25
"""Small compared to what the layers add to the residual stream: a tied head would otherwise repeat the last token."""
_EXPERT_STRENGTHS: Final = (0.5, 0.25)
"""Components of a token's embedding in the directions of its first and of its last expert: small like the others."""
_ROUTER_SCALE: Final = 4.0
"""Makes the router logits of a token's first and last expert differ by about one."""


class _Arch(NamedTuple):
    architecture: str
    model_type: str
    rope: TinyRope = "default"
    rope_theta: float = 10000.0
    tied: bool = False
    new_rope_spelling: bool = False
    """True: config.json has `rope_parameters`, as of transformers 5; False: `rope_theta` and `rope_scaling`."""
    shards: int = 1
    extra: Mapping[str, Any] = {}


_WINDOW_OFF: Final = {"sliding_window": None, "use_sliding_window": False}

_RERANKER_TOKENS: Final = ("yes", "no", "<think>", "</think>")
"""Tokens that tell a decoder that scores pairs from one that cannot."""
_LETTERS: Final = str.maketrans("0123456789", "abcdefghij")
_ARCHS: Final[Mapping[str, _Arch]] = {
    "llama": _Arch("LlamaForCausalLM", "llama", rope="llama3", rope_theta=500000.0, shards=2),
    "mistral": _Arch("MistralForCausalLM", "mistral", shards=2, extra={"sliding_window": None}),
    "qwen2": _Arch("Qwen2ForCausalLM", "qwen2", rope_theta=1000000.0, tied=True, extra=_WINDOW_OFF),
    "qwen3": _Arch(
        "Qwen3ForCausalLM", "qwen3", rope_theta=1000000.0, tied=True, new_rope_spelling=True, extra=_WINDOW_OFF
    ),
    "qwen3-moe": _Arch(
        "Qwen3MoeForCausalLM", "qwen3_moe", rope_theta=1000000.0, new_rope_spelling=True, shards=2, extra=_WINDOW_OFF
    ),
}

TINY_ARCHS: Final = tuple(_ARCHS)


def write_tiny_checkpoint(
    out: str | Path,
    arch: str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 576,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_intermediate: int = 64,
    max_position: int = 2048,
    rope: TinyRope | None = None,
    tied: bool | None = None,
    activation: str = "silu",
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    quantization: str | None = None,
    config_extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint directory for `arch`, one of TINY_ARCHS; returns `out`. Same arguments, same bytes.

    `rope` and `tied` default to those of the family's models; `quantization` is one of QUANTIZATION_CONFIGS;
    `config_extra` is added to config.json. Raises ModelError for invalid shapes.
    """
    if arch not in _ARCHS:
        raise ModelError("unknown_tiny_arch", f"{arch!r} is not one of {', '.join(_ARCHS)}")
    if hidden % heads:
        raise ModelError("invalid_tiny_model", f"hidden size {hidden} must be a multiple of the {heads} heads")
    family, spec = FAMILIES[arch], _ARCHS[arch]
    tokenizer = train_tokenizer(family, vocab)
    stops = [tokenizer.token_to_id(token) for token in family.stops]
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "model_type": spec.model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "hidden_act": activation,
        "tie_word_embeddings": spec.tied if tied is None else tied,
        "bos_token_id": tokenizer.token_to_id(family.bos) if family.bos else None,
        "eos_token_id": stops[0],
        "pad_token_id": tokenizer.token_to_id(family.pad),
        "torch_dtype": dtype,
        **_rope(rope or spec.rope, spec, max_position),
        **spec.extra,
    }
    if arch == "qwen3-moe":
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if quantization is not None:
        config["quantization_config"] = QUANTIZATION_CONFIGS[quantization]
    config |= config_extra or {}
    weights = _weights(ModelConfig.parse(config), tokenizer, family, seed)
    return write_checkpoint(Path(out), config, tokenizer, family, weights, spec.shards)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    family: Family,
    weights: Mapping[str, torch.Tensor],
    shards: int = 1,
    *,
    sampling: Mapping[str, float] | None = None,
) -> Path:
    """Write a directory that this runtime and Hugging Face's libraries can load, with `config` as its config.json, and
    `sampling` as default sampling parameters; returns `folder`. Raises ModelError `cannot_write`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError("cannot_write", f"{folder} cannot be created ({error.strerror}); use another one") from error
    stops = [tokenizer.token_to_id(token) for token in family.stops]
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": stops,
            "pad_token_id": config["pad_token_id"],
            **(sampling or {}),
        },
    )
    _write_tokenizer(folder, tokenizer, family, config["max_position_embeddings"])
    _write_weights(folder, weights, shards)
    # Last: a directory with a config.json is complete.
    _write_json(folder / "config.json", config)
    return folder


def _rope(kind: TinyRope, spec: _Arch, max_position: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    if kind == "linear":
        scaling = {"rope_type": kind, "factor": 4.0}
    elif kind == "yarn":
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": max_position // 4}
    elif kind == "llama3":
        scaling = {
            "rope_type": kind,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": max_position // 8,
        }
    if spec.new_rope_spelling:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta} | scaling}
    return {"rope_theta": spec.rope_theta, "rope_scaling": scaling or None}


def _weights(config: ModelConfig, tokenizer: Tokenizer, family: Family, seed: int) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, config.dtype)
    sources = checkpoint_parameters(config).sources
    weights = {source.name: random_tensor(source.name, source.shape, seed) for source in sources}
    weights["model.embed_tokens.weight"] *= _EMBEDDING_SCALE
    if config.decoder.tied_embeddings:
        weights["model.norm.weight"] *= _LOGIT_SCALE / _EMBEDDING_SCALE
    else:
        weights["lm_head.weight"] *= _LOGIT_SCALE
    head = weights["model.embed_tokens.weight" if config.decoder.tied_embeddings else "lm_head.weight"]
    head *= _row_scale(config.vocab_size, tokenizer, family)
    if config.moe is not None:
        _separate_experts(weights, config, config.moe, seed)
    stored: dict[str, torch.Tensor] = {}
    for source in sources:
        weight = weights[source.name].to(dtype)
        if source.format is None:
            stored[source.name] = weight
            continue
        layer = source.name.removesuffix("weight")
        for suffix, tensor in quantize(source.format, weight, dtype).tensors.items():
            stored[layer + suffix] = tensor
    return stored


def _separate_experts(weights: dict[str, torch.Tensor], config: ModelConfig, moe: MoeConfig, seed: int) -> None:
    """Give each token experts whose router logits are clearly separated from all others. The last experts that a
    random router selects are often nearly equal to the next ones: rounding swaps them, and the token's logits change
    completely.

    Each expert has its own direction of the residual stream. Embeddings write to it, layers do not, and routers read
    nothing else. Changes `weights` in place.
    """
    vocab, hidden, experts, chosen = config.vocab_size, config.hidden_size, moe.num_experts, moe.experts_per_token
    if experts > hidden:
        raise ModelError("invalid_tiny_model", f"{experts} experts exceed the hidden size {hidden}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(hidden, experts, generator=generator)).Q
    choice = torch.rand(vocab, experts, generator=generator).topk(chosen).indices
    strengths = torch.linspace(*_EXPERT_STRENGTHS, chosen).expand(vocab, chosen)
    for name, weight in weights.items():
        if name == "model.embed_tokens.weight":
            weight.sub_(weight @ directions @ directions.T)
            weight.add_(torch.zeros(vocab, experts).scatter_(1, choice, strengths) @ directions.T)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.sub_(directions @ (directions.T @ weight))
        elif name.endswith("mlp.gate.weight"):
            norm = weights[name.replace("mlp.gate", "post_attention_layernorm")]
            weight.copy_(_ROUTER_SCALE * directions.T / norm)


def _row_scale(vocab_size: int, tokenizer: Tokenizer, family: Family) -> torch.Tensor:
    """Scale of each row of the LM head, float32 [vocab, 1]. Control tokens and ids without a token are hardly ever
    sampled, so that answers do not end by chance; parts of characters less often than letters, so that answers are
    readable."""
    scale = torch.full((vocab_size, 1), 0.1)
    for token, index in tokenizer.get_vocab().items():
        if token not in family.control_tokens:
            scale[index] = 0.5 if is_lone_byte(token) else 1.0
    return scale


def _write_weights(folder: Path, weights: Mapping[str, torch.Tensor], shards: int) -> None:
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    names = sorted(weights)
    metadata = {"format": "pt"}
    if shards == 1:
        (folder / "model.safetensors").write_bytes(save(dict(weights), metadata))
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        (folder / file).write_bytes(save(part, metadata))
        weight_map |= dict.fromkeys(part, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, family: Family, max_position: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    special = {name: token for name, token in special.items() if token is not None}
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": family.chat_template,
            **special,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_dummy_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a directory with `config` as its config.json, a synthetic tokenizer of the same vocabulary size, and no
    tensors, for `serve --dummy-weights`; returns `folder`. Raises ModelError."""
    # Benchmarks need tokens, whichever they are.
    family = FAMILIES.get(config["model_type"].replace("_", "-"), FAMILIES["qwen3"])
    tokenizer = _fill_vocabulary(train_tokenizer(family, config["vocab_size"]), config["vocab_size"])
    ids = {
        "bos_token_id": tokenizer.token_to_id(family.bos) if family.bos else None,
        "eos_token_id": tokenizer.token_to_id(family.eos),
        "pad_token_id": tokenizer.token_to_id(family.pad),
    }
    return write_checkpoint(folder, {**config, **ids}, tokenizer, family, {})


def dummy_word(index: int) -> str:
    """Word of token `index` of a filled vocabulary: letters alone, since tokenizers split words from digits."""
    return "w" + str(index).translate(_LETTERS)


def _fill_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Add a token for each id without one: those that a reranker needs, then words. A sampled id decodes to a text, as
    with the model's own tokenizer, and such a word behind a blank is one token."""
    content, known = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    used = set(known.values())
    # Includes control tokens: they would otherwise get new ids behind the added ones.
    free = [index for index in range(vocab_size) if index not in used]
    names = [token for token in _RERANKER_TOKENS if token not in known]
    names += [f"Ġ{dummy_word(index)}" for index in free[len(names) :]]
    content["model"]["vocab"] = known | dict(zip(names, free, strict=False))
    content["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(content))
