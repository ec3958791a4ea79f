"""Generated answers in every format come out as they went in, however they are cut into tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from support.parsing.answers import WRITERS, Answer, random_answer, random_call
from support.parsing.replay import Result, by_bytes, cut, formats, replay, tokens

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]")
VOCABULARY = (*MARKERS, "[/THINK]", "<|python_tag|>")

every_format = pytest.mark.parametrize("name", WRITERS)


def same(found: Any, expected: Any) -> bool:
    """Compare JSON values by their exact types: true is not 1. Integers of a format without types may be floats."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and [*found] == [*expected] and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def check(found: Result, answer: Answer) -> None:
    """Compare the output with the answer that was written."""
    assert found.reasoning == answer.reasoning
    texts = [part for part in answer.parts if isinstance(part, str)]
    assert found.text == "\n".join(texts), "texts stay apart where a call was between them"
    assert [name for name, _ in found.calls] == [call.name for call in answer.calls]
    for (_, arguments), call in zip(found.calls, answer.calls, strict=True):
        assert same(json.loads(arguments), call.arguments), (arguments, call.arguments)


@every_format
def test_every_split_in_two_gives_the_same_output(name: str) -> None:
    parser, write = WRITERS[name]
    rng = random.Random(name)
    answers = formats(parser)
    for number in range(100):
        answer = Answer("", ((random_call(rng),),)) if number % 5 else random_answer(rng)
        text = write(answer, rng)
        whole = replay(answers, [text])
        check(whole, answer)
        assert replay(answers, by_bytes(text)) == whole
        for place in range(1, len(text.encode())):
            assert replay(answers, by_bytes(text, [place])) == whole, (text, place)


@every_format
def test_random_partitions_give_the_same_output(name: str) -> None:
    """2,500 answers of each format; half of the vocabularies have the markers as tokens."""
    parser, write = WRITERS[name]
    rng = random.Random(name)
    for number in range(2500):
        answers = formats(parser, VOCABULARY if number % 2 else ())
        answer = random_answer(rng)
        parts = tokens(answers, write(answer, rng))
        whole = replay(answers, parts)
        check(whole, answer)
        for _ in range(3):
            assert replay(answers, cut(parts, answers, rng)) == whole


@pytest.mark.parametrize("key", ["list", "note"])
def test_long_values_take_linear_time(key: str) -> None:
    """A value that may have several types is decided when it ends. Read again for each token, it would take minutes."""
    text = " " * 100_000 + '["' + "7 " * 100_000 + '"]'
    answer = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    pieces = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    (call,) = replay(formats("qwen3_coder"), pieces).calls
    assert len(call[1]) >= 200_000
