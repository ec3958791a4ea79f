"""A model that looks words up in its context, with weights that are written and not trained, and contexts for it.

Each word has a key and a code, random directions. A needle is a token that carries the key of one word and the code of
another, its answer. When the last token is a word, the only layer attends to tokens with this word's key, and the LM
head reads the word of the code that attention brings. The answer, decoded, asks for its own answer in turn: the needles
of a context are a chain.

Filler tokens have random keys and codes. For each word there are tokens with nearly its key (`NEARNESS`) and the code
of a wrong answer; a cache that rounds keys too coarsely prefers one of those. Keys are in the slow half of the
dimensions that RoPE rotates, which turn by at most 0.07 radians in 65,536 tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl import LLM, SamplingParams
from minisgl.config import Device, EngineArgs
from minisgl.models.decoder import Decoder
from support.numerics.rounded_kv import RoundedKV, RoundedKVAttention

WORDS: Final = 64
NEAR: Final = 8
"""Tokens with nearly the key of a word, for each word."""
FILLERS: Final = 8192
NEARNESS: Final = 0.97
"""Cosine of their key and the word's."""
SHARPNESS: Final = 64.0
"""Attention score of a token with the very key of a word."""
LONGEST: Final = 65_536 + 64

_KV_HEADS: Final = 2
_HEADS: Final = 4
_HEAD_DIM: Final = 128
_KEY_DIM: Final = _HEAD_DIM // 2
_CODE_DIM: Final = _HEAD_DIM
_ROPE_THETA: Final = 1e12

_KEYS: Final = _KV_HEADS * _KEY_DIM
_KEY: Final = slice(0, _KEYS)
_ASKED: Final = slice(_KEYS, 2 * _KEYS)
_CODE: Final = slice(2 * _KEYS, 2 * _KEYS + _CODE_DIM)
_ANSWER: Final = slice(2 * _KEYS + _CODE_DIM, 2 * _KEYS + 2 * _CODE_DIM)
"""Parts of the residual stream: a token's own key, the key that it asks for, its own code, and the code found."""
_HIDDEN: Final = _ANSWER.stop

_FIRST_NEEDLE: Final = WORDS
_FIRST_NEAR: Final = _FIRST_NEEDLE + WORDS * WORDS
_FIRST_FILLER: Final = _FIRST_NEAR + WORDS * NEAR
_VOCAB: Final = _FIRST_FILLER + FILLERS


@dataclass(frozen=True)
class Haystack:
    """A context with a needle at each depth, the first one last in its part."""

    context: tuple[int, ...]
    chain: tuple[int, ...]
    """Words by depth of their needles. Each one's answer is the next, and the last one's the first."""

    def prompts(self) -> list[list[int]]:
        return [[*self.context, word] for word in self.chain]

    def answer(self, depth: int, tokens: int) -> list[int]:
        """The right answer of `tokens` words to the prompt of a depth."""
        return [self.chain[(depth + 1 + step) % len(self.chain)] for step in range(tokens)]


def haystack(length: int, depths: int, seed: int) -> Haystack:
    """A context of `length` tokens with needles at equal distances, and tokens with nearly their keys at random
    places."""
    random = np.random.default_rng(seed)
    chain = tuple(random.permutation(WORDS)[:depths].tolist())
    context = random.integers(_FIRST_FILLER, _VOCAB, length)
    near = [_FIRST_NEAR + word * NEAR + number for word in chain for number in range(NEAR)]
    context[random.permutation(length)[: len(near)]] = near
    for depth, word in enumerate(chain):
        answer = chain[(depth + 1) % depths]
        context[(2 * depth + 1) * length // (2 * depths)] = _FIRST_NEEDLE + word * WORDS + answer
    return Haystack(tuple(context.tolist()), chain)


def count_found(stack: Haystack, answers: Sequence[Sequence[int]]) -> int:
    """Number of prompts whose whole answer is right."""
    return sum(list(tokens) == stack.answer(depth, len(tokens)) for depth, tokens in enumerate(answers))


def write_retrieval_model(folder: Path) -> Path:
    """Write the checkpoint, a llama of one layer; returns `folder`. Prompts are token ids: it has no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": _embeddings(),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": _lm_head(),
        f"{layer}input_layernorm.weight": torch.ones(_HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(_HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": weight for name, weight in _attention().items()},
        **{f"{layer}mlp.{name}_proj.weight": torch.zeros(_HIDDEN, _HIDDEN) for name in ("gate", "up", "down")},
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCAB,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-6,
        "rope_theta": _ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _directions(count: int, size: int, seed: int) -> torch.Tensor:
    """[count, size] unit vectors."""
    random = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return random.div(random.norm(dim=-1, keepdim=True))


def _keys(count: int, seed: int) -> torch.Tensor:
    """[count, KV heads, key size] unit vectors: each KV head has keys of its own."""
    return _directions(count * _KV_HEADS, _KEY_DIM, seed).view(count, _KV_HEADS, _KEY_DIM)


def _codes() -> torch.Tensor:
    """[words, code size]"""
    return _directions(WORDS, _CODE_DIM, seed=1)


def _near_keys(words: torch.Tensor) -> torch.Tensor:
    """[words * NEAR, KV heads, key size] unit vectors with cosine `NEARNESS` to those of their word."""
    words = words.repeat_interleave(NEAR, 0)
    other = _keys(len(words), seed=2)
    other -= (other * words).sum(-1, keepdim=True) * words
    other /= other.norm(dim=-1, keepdim=True)
    return words * NEARNESS + other * math.sqrt(1 - NEARNESS**2)


def _embeddings() -> torch.Tensor:
    """All rows have the same size, so that the norm only multiplies them by a constant."""
    words, codes = _keys(WORDS, seed=0), _codes()
    # One in 64 is right by chance.
    wrong = torch.randint(WORDS, (WORDS * NEAR,), generator=torch.Generator().manual_seed(3))
    keys = torch.cat(
        (_keys(WORDS, seed=4), words.repeat_interleave(WORDS, 0), _near_keys(words), _keys(FILLERS, seed=5))
    )
    table = torch.zeros(_VOCAB, _HIDDEN)
    table[:, _KEY] = keys.flatten(1) / _KV_HEADS**0.5
    table[:WORDS, _ASKED] = words.flatten(1) / _KV_HEADS**0.5
    table[_FIRST_NEEDLE:, _CODE] = torch.cat(
        (codes.repeat(WORDS, 1), codes[wrong], _directions(FILLERS, _CODE_DIM, seed=6))
    )
    return table


def _attention() -> dict[str, torch.Tensor]:
    """Weights by the name of the projection."""
    # RoPE rotates pairs (i, i + D / 2), the fastest first.
    quarter = _HEAD_DIM // 4
    slow = torch.cat((torch.arange(quarter, 2 * quarter), torch.arange(3 * quarter, 4 * quarter)))
    # Norms give rows of two unit vectors the size √hidden.
    key_square = _HIDDEN / 2 / _KV_HEADS
    q, k = torch.zeros(_HEADS, _HEAD_DIM, _HIDDEN), torch.zeros(_KV_HEADS, _HEAD_DIM, _HIDDEN)
    v, out = torch.zeros(_KV_HEADS, _HEAD_DIM, _HIDDEN), torch.zeros(_HIDDEN, _HEADS, _HEAD_DIM)
    part = torch.arange(_KEY_DIM)
    for head in range(_KV_HEADS):
        k[head, slow, _KEY.start + head * _KEY_DIM + part] = 1.0
        v[head, :, _CODE] = torch.eye(_CODE_DIM)
    for head in range(_HEADS):
        group = head * _KV_HEADS // _HEADS
        q[head, slow, _ASKED.start + group * _KEY_DIM + part] = SHARPNESS * _HEAD_DIM**0.5 / key_square
        out[_ANSWER, head] = torch.eye(_CODE_DIM) / _HEADS
    return {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1), "o": out.flatten(1)}


def _lm_head() -> torch.Tensor:
    table = torch.zeros(_VOCAB, _HIDDEN)
    table[:WORDS, _ANSWER] = _codes()
    return table


@torch.inference_mode()
def found_in_float32(model: Decoder, stacks: Sequence[Haystack], kv: RoundedKV) -> int:
    """Number of first words that the model finds when it attends to rounded keys and values."""
    found = 0
    for stack in stacks:
        # The words of all prompts one behind the other: their own keys are random and their codes zero.
        tokens = torch.tensor([*stack.context, *stack.chain], device=model.parameters.device)
        positions = torch.arange(len(tokens), device=tokens.device)
        hidden = model.forward(tokens, positions, RoundedKVAttention(kv), positions[len(stack.context) :])
        best = model.local_logits(hidden).argmax(-1)
        found += count_found(stack, best[:, None].tolist())
    return found


def found_by_engine(checkpoint: Path, stacks: Sequence[Haystack], device: Device, options: EngineArgs) -> int:
    """Number of prompts for which an engine decodes the right two words: it finds the first one with the kernels of
    prompts and the second one with those of decoding."""
    options = options | EngineArgs(max_model_len=len(stacks[0].context) + 3)
    found = 0
    with LLM(str(checkpoint), device=device, detokenize=False, **options) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        for stack in stacks:
            # First alone, so that the others find the context in a prefix cache.
            prompts = stack.prompts()
            outputs = llm.generate(prompts[:1], params) + llm.generate(prompts[1:], params)
            found += count_found(stack, [output.token_ids for output in outputs])
        if options.get("cache", "radix") == "radix":
            assert llm.counters.cached_tokens >= sum(
                (len(stack.chain) - 1) * (len(stack.context) // llm.limits.page_size) * llm.limits.page_size
                for stack in stacks
            )
    return found
