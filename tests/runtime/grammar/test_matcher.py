"""Masks of tokens, and answers that satisfy them, with the tokenizer of a tiny checkpoint."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLParserLimits
from numpy.typing import NDArray

from minisgl.errors import GrammarError
from minisgl.grammar import compiler
from minisgl.grammar.build import build
from minisgl.grammar.matcher import Matcher
from minisgl.grammar.validate import validate
from minisgl.wire.text import ConstraintKind, StructuredOutput
from support.grammar.walk import eos_tokens, grammars, next_tokens, random_answer, tokenizer


def matcher(kind: ConstraintKind, value: object) -> Matcher:
    text = value if isinstance(value, str) else json.dumps(value)
    return grammars().matcher(build(StructuredOutput(kind, text)))


def allowed(row: NDArray[np.int32]) -> list[int]:
    tokens: list[int] = np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()
    return tokens


def test_eos_tokens_are_allowed_exactly_where_the_answer_may_end() -> None:
    state = matcher("regex", "a{2,3}")
    token = tokenizer().token_to_id("a")
    seen = []
    for _ in range(3):
        seen.append((set(eos_tokens()) <= set(next_tokens(state)), state.can_end, state.is_stopped))
        assert state.consume(token)
    assert seen == [(False, False, False), (False, False, False), (True, True, False)]
    assert (next_tokens(state), state.is_stopped) == (sorted(eos_tokens()), True)


def test_tokens_of_the_padded_vocabulary_are_never_allowed() -> None:
    tokens = next_tokens(matcher("regex", "(?s:.*)"))
    assert max(tokens) < tokenizer().get_vocab_size()
    assert set(tokens) & set(tokenizer().get_added_tokens_decoder()) == set(eos_tokens())


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


@pytest.mark.parametrize("slow", [1, 5])
def test_two_threads_fill_rows_of_the_same_masks(slow: int) -> None:
    states = [matcher("choice", ["a", "bb"]), matcher("regex", "[0-9]+"), matcher("regex", "(?s:.*)")] * 20
    masks = np.full((60, grammars().mask_words), -1, np.int32)
    rows = [(state.copy(), row) for row, state in enumerate(states)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            masks[:] = -1
            first = threads.submit(grammars().fill, rows[2 : 2 + slow], masks, slow=True)
            others = threads.submit(grammars().fill, rows[:2] + rows[2 + slow :], masks)
            assert first.result() == others.result() == {}
            for row, state in enumerate(states[:9]):
                assert allowed(masks[row]) == next_tokens(state)


def test_the_text_of_a_special_token_is_not_that_token() -> None:
    for text in ("<|im_end|>", "a<|im_start|>b", "<|endoftext|>"):
        assert random_answer(matcher("choice", [text]), random.Random(1)) == text
        assert random_answer(matcher("json", {"const": text}), random.Random(1)) == json.dumps(text)


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
def test_every_kind_gives_answers(kind: ConstraintKind, value: object) -> None:
    for seed in range(5):
        assert random_answer(matcher(kind, value), random.Random(seed)) is not None


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", r"a[^\s\S]", "no text satisfies the grammar"),
        ("grammar", "root ::= root", "no text satisfies the grammar"),
        ("json", r'{"type": "string", "pattern": "^[^\\b\\t\\n\\f\\r -~\\x80-\\u{10ffff}]$"}', "#: no value is valid"),
    ],
)
def test_a_constraint_without_answers_is_refused_in_plain_words(kind: ConstraintKind, value: str, message: str) -> None:
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput(kind, value))
    assert error.value.message == message


def test_a_bad_grammar_is_refused() -> None:
    with pytest.raises(GrammarError) as error:
        grammars().matcher("start: missing")
    assert error.value.code == "invalid_grammar"


def test_an_answer_that_cannot_go_on_is_an_error_of_its_grammar() -> None:
    state = matcher("grammar", 'start: "a" B | "b"\nB: /b+/ & /c+/')
    assert state.consume(tokenizer().token_to_id("a"))
    with pytest.raises(GrammarError) as error:
        next_tokens(state)
    assert error.value.code == "no_allowed_token" and "matches nothing" in error.value.message
    masks = np.zeros((8, grammars().mask_words), np.int32)
    errors = grammars().fill([(state.copy(), row) for row in range(8)], masks)
    assert {row: one.code for row, one in errors.items()} == dict.fromkeys(range(8), "no_allowed_token")


def test_a_token_that_exceeds_a_limit_is_an_error_of_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LIMITS", LLParserLimits(max_lexer_states=50, verbose_errors=False))
    state = matcher("regex", "start(a|b)*a(a|b){20}end")
    with pytest.raises(GrammarError) as error:
        for character in "start" + "aab" * 20:
            next_tokens(state)
            assert state.consume(tokenizer().token_to_id(character))
    assert error.value.code == "grammar_too_complex"
    assert error.value.message.startswith("lexer error: too many states")


def test_tokens_of_many_rows_are_consumed_in_order() -> None:
    one, other = tokenizer().token_to_id("a"), tokenizer().token_to_id("b")
    states = [matcher("regex", "a|ab" if row % 3 else "b") for row in range(200)]
    assert grammars().consume([(state, one) for state in states]) == [bool(row % 3) for row in range(200)]
    rest = [state for row, state in enumerate(states) if row % 3]
    assert all(grammars().consume([(state, other) for state in rest]))
    assert all(state.is_stopped for state in rest)
