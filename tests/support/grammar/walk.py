"""Random answers under a grammar."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from minisgl.grammar.grammars import Grammars
from minisgl.grammar.matcher import Matcher
from support.tiny_checkpoint import tiny_checkpoint

PADDING: Final = 37
"""Ids at the end of the vocabulary that are no tokens."""
_CLOSING: Final = '"}],:0123456789'


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint() / "tokenizer.json"))


@cache
def eos_tokens() -> tuple[int, ...]:
    return tuple(json.loads((tiny_checkpoint() / "generation_config.json").read_text())["eos_token_id"])


@cache
def grammars() -> Grammars:
    return Grammars(tiny_checkpoint(), tokenizer().get_vocab_size() + PADDING, eos_tokens(), threads=2)


@cache
def _closing_tokens() -> frozenset[int]:
    return frozenset(tokenizer().encode(_CLOSING, add_special_tokens=False).ids)


def next_tokens(matcher: Matcher) -> list[int]:
    row = np.full(grammars().mask_words, -1, np.int32)
    matcher.fill_mask(row)
    tokens: list[int] = np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()
    return tokens


def random_answer(matcher: Matcher, rng: random.Random, limit: int = 300) -> str | None:
    """A random answer; None when it is not complete after `limit` tokens. `eager` answers come to an end soon."""
    eager = rng.random()
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = next_tokens(matcher)
        assert allowed, "an answer can always go on or end"
        ends = [token for token in allowed if token in eos_tokens()]
        if ends and rng.random() < 0.3 + eager / 2:
            return text_of(tokens)
        closing = [token for token in allowed if token in _closing_tokens()]
        token = rng.choice(closing if closing and rng.random() < eager else allowed)
        if token in eos_tokens():
            return text_of(tokens)
        assert matcher.consume(token), matcher.error()
        tokens.append(token)
    return None


def text_of(tokens: list[int]) -> str:
    text: str = tokenizer().decode(tokens, skip_special_tokens=False)
    return text
