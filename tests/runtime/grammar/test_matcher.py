"""Masks of tokens, and answers that satisfy them, with the tokenizer of a tiny checkpoint."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from minisgl.grammar.build import build
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.grammars import Grammars
from minisgl.grammar.matcher import Matcher
from minisgl.wire.text import StructuredOutput
from support.tiny_checkpoint import tiny_checkpoint


def _generation_config(folder: Path) -> tuple[int, ...]:
    return tuple(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])


PADDING = 37
EOS = _generation_config(tiny_checkpoint())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint() / "tokenizer.json"))


def vocab_size() -> int:
    return tokenizer().get_vocab_size() + PADDING


@cache
def grammars() -> Grammars:
    return Grammars(tiny_checkpoint(), vocab_size(), EOS, threads=2)


def matcher(kind: str, value: object) -> Matcher:
    text = value if isinstance(value, str) else json.dumps(value)
    return grammars().matcher(build(StructuredOutput(kind, text)))  # type: ignore[arg-type]


def allowed(row: NDArray[np.int32]) -> list[int]:
    return np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()


def next_tokens(matcher: Matcher) -> list[int]:
    row = np.full(grammars().mask_words, -1, np.int32)
    matcher.fill_mask(row)
    return allowed(row)


def answer(matcher: Matcher, rng: random.Random, limit: int = 200) -> str | None:
    """A random answer; None when it is not complete after `limit` tokens."""
    tokens: list[int] = []
    while len(tokens) < limit:
        token = rng.choice(next_tokens(matcher))
        if token in EOS:
            return tokenizer().decode(tokens, skip_special_tokens=False)
        assert matcher.consume(token)
        tokens.append(token)
    return None


def test_eos_tokens_are_allowed_exactly_where_the_answer_may_end() -> None:
    state = matcher("regex", "a{2,3}")
    token = tokenizer().token_to_id("a")
    seen = []
    for _ in range(3):
        seen.append((set(EOS) <= set(next_tokens(state)), state.can_end, state.is_stopped))
        assert state.consume(token)
    assert seen == [(False, False, False), (False, False, False), (True, True, False)]
    assert (next_tokens(state), state.is_stopped) == (sorted(EOS), True)


def test_tokens_of_the_padded_vocabulary_are_never_allowed() -> None:
    tokens = next_tokens(matcher("regex", "(?s:.*)"))
    assert max(tokens) < vocab_size() - PADDING
    assert set(tokens) & set(tokenizer().get_added_tokens_decoder()) == set(EOS)


def test_a_refused_token_is_reported() -> None:
    assert not matcher("regex", "a").consume(tokenizer().token_to_id("b"))


def test_a_copy_and_a_replay_are_independent_of_their_origin() -> None:
    first = matcher("regex", "a(b|c)")
    a, b, c = (tokenizer().token_to_id(text) for text in "abc")
    assert first.consume(a)
    second, third = first.copy(), matcher("regex", "a(b|c)")
    assert third.replay([a]) and second.consume(c) and first.consume(b) and third.consume(c)
    assert first.is_stopped and second.is_stopped and third.is_stopped
    assert not matcher("regex", "a(b|c)").replay([a, a])


def test_many_rows_are_filled_at_once() -> None:
    states = [matcher("choice", ["a", "bb"]), matcher("regex", "[0-9]+"), matcher("json", {"type": "boolean"})] * 80
    masks = np.full((250, grammars().mask_words), -1, np.int32)
    assert grammars().fill([(state.copy(), row + 5) for row, state in enumerate(states)], masks) == {}
    assert (masks[:5] == -1).all() and (masks[245:] == -1).all()
    for row in range(5, 245):
        assert allowed(masks[row]) == next_tokens(states[row - 5])
    token = tokenizer().token_to_id("7")
    assert grammars().consume([(states[1], token), (states[0], token)]) == [True, False]


def test_the_text_of_a_special_token_is_not_that_token() -> None:
    for text in ("<|im_end|>", "a<|im_start|>b", "<|endoftext|>"):
        for kind, value in (("choice", [text]), ("json", {"const": text})):
            written = answer(matcher(kind, value), random.Random(1))
            assert written is not None and (json.loads(written) if kind == "json" else written) == text


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"type": "array", "prefixItems": [{"enum": ["x", 1]}], "minItems": 1, "maxItems": 1}),
        ("regex", r"[a-z]{3}-\d{2}/(x|é)"),
        ("choice", ["yes", "no", 'qu"ote', "line\nbreak", "é😀"]),
        ("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]{1,3}/'),
        ("grammar", 'root ::= "a" [0-9]+ tail\ntail ::= "!" | "?"'),
    ],
)
def test_every_kind_gives_answers(kind: str, value: object) -> None:
    for seed in range(5):
        assert answer(matcher(kind, value), random.Random(seed)) is not None


def test_a_bad_grammar_is_refused() -> None:
    with pytest.raises(GrammarError) as error:
        grammars().matcher("start: missing")
    assert error.value.code == "invalid_grammar"
