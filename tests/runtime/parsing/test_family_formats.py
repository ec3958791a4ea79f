"""Formats of further families: calls come out as they went in, however an answer is cut, and what is broken is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_text import call_text
from minisgl.parsing.gemma_call import can_be_key
from minisgl.parsing.names import ToolCallParser
from minisgl.parsing.reasoning import ReasoningState
from support.parsing.answers import Call, random_call
from support.parsing.replay import Result, by_bytes, cut, formats, replay, tokens

MARKERS: Final[dict[ToolCallParser, tuple[str, ...]]] = {
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": ("<|tool_call|>",),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "exaone4": ("<tool_call>", "</tool_call>"),
    "hunyuan": (),
    "hunyuan_a13b": (),
    "olmo3": (),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "nemotron_json": (),
}
"""Markers that the vocabulary of the family has as tokens, by format."""
SYNTAX: Final = (
    *('<|"|>', "<tool_call>", "</tool_call>", "<|tool_call>call:", "<|tool_call>", "<tool_call|>", "<tool_calls>"),
    *("</tool_calls>", "<|tool_call|>", "<|/tool_call|>", "functools[", "<function_calls>", "</function_calls>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', '<parameter name="text">', "</invoke>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<function=now>", "<parameter=text>", "</parameter>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "text", "now", "```json\n", "```", "get_weather"),
    *("{", "}", "[", "]", "(", ")", ",", ":", "=", '"', "'", "\\", "\n", " ", "null", "True", "12", "é", "🙂", "x"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *('{"name": "now", "arguments": {', "now(", "text=", "now{", "text:", "\x00", "</think>"),
)

# Tracing would make thousands of replays take twice as long; other tests reach the same lines.

every_format = pytest.mark.parametrize("name", MARKERS)


def vocabularies(name: ToolCallParser) -> Iterator[AnswerFormat]:
    """Yield the format in a vocabulary with the markers as tokens, and in one without."""
    yield formats(name)
    if MARKERS[name]:
        yield formats(name, MARKERS[name])


def strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for one in value:
                yield from strings(one)
        case dict():
            for key, one in value.items():
                yield from (key, *strings(one))


def keys(value: Any) -> Iterator[str]:
    match value:
        case list():
            for one in value:
                yield from keys(one)
        case dict():
            for key, one in value.items():
                yield from (key, *keys(one))


def written(name: ToolCallParser, rng: random.Random, most: int = 3) -> list[Call]:
    """Return random calls that the format can write."""
    calls: list[Call] = []
    while len(calls) < rng.randint(1, most):
        call = random_call(rng)
        texts = [*strings(call.arguments)]
        if any(marker in text for marker in MARKERS[name] for text in texts):
            continue
        if name == "gemma4" and not all(map(can_be_key, keys(call.arguments))):
            continue
        calls.append(call)
    return calls


def text_of(answers: AnswerFormat, calls: list[Call]) -> str:
    return call_text(answers, [(call.name, call.arguments) for call in calls])


def exactly(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@every_format
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_calls_come_out_as_they_went_in_however_they_are_cut(name: ToolCallParser, seed: int) -> None:
    rng = random.Random(seed)
    calls = written(name, rng)
    reasoning, text = rng.choice(("", "hm\n<b>")), rng.choice(("", "Let me look: {x} [1](2)"))
    for answers in vocabularies(name):
        answer = f"<think>\n{reasoning}\n</think>\n\n" * bool(reasoning) + (f"{text}\n" if text else "")
        parts = tokens(answers, answer + text_of(answers, calls))
        whole = replay(answers, parts)
        assert (whole.reasoning, whole.text) == (reasoning, text)
        found = [(one, json.loads(arguments)) for one, arguments in whole.calls]
        assert exactly(found) == exactly([(call.name, call.arguments) for call in calls])
        for _ in range(3):
            assert replay(answers, cut(parts, answers, rng)) == whole


@every_format
def test_every_split_in_two_gives_the_same_output(name: ToolCallParser) -> None:
    rng = random.Random(name)
    answers = formats(name)
    for _ in range(6):
        text = text_of(answers, written(name, rng, most=2))
        whole = replay(answers, [text])
        assert replay(answers, by_bytes(text)) == whole
        for place in range(1, len(text.encode())):
            assert replay(answers, by_bytes(text, [place])) == whole, (text, place)


@every_format
def test_answers_that_are_cut_anywhere_are_beginnings_of_the_whole(name: ToolCallParser) -> None:
    rng = random.Random(name)
    for answers in vocabularies(name):
        for _ in range(6):
            parts = tokens(answers, "Yes\n" + text_of(answers, written(name, rng)))
            pieces = cut(parts, answers, rng)
            whole = replay(answers, pieces)
            for end in range(len(pieces)):
                found = replay(answers, pieces[:end])
                assert [one for one, _ in found.calls] == [one for one, _ in whole.calls][: len(found.calls)]
                assert found.calls[:-1] == whole.calls[: max(len(found.calls) - 1, 0)]


@every_format
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(SYNTAX), max_size=24), has_tokens=st.booleans(), seed=st.integers(0, 9))
def test_any_soup_of_syntax_gives_the_same_output_in_pieces(
    name: ToolCallParser, pieces: list[str], has_tokens: bool, seed: int
) -> None:
    answers = formats(name, MARKERS[name] if has_tokens else ())
    parts = tokens(answers, "".join(pieces))
    whole = replay(answers, parts, ReasoningState.BEHIND)
    assert replay(answers, cut(parts, answers, random.Random(seed)), ReasoningState.BEHIND) == whole
    assert replay(answers, pieces, tools=None, state=ReasoningState.BEHIND).text == "".join(pieces) or has_tokens


@every_format
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damaged_calls_give_the_same_output_in_pieces(name: ToolCallParser, seed: int) -> None:
    rng = random.Random(seed)
    for answers in vocabularies(name):
        text = text_of(answers, written(name, rng))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            end = at + rng.randint(1, 9)
            text = rng.choice((text[:at] + rng.choice(SYNTAX) + text[at:], text[:at] + text[end:], text[:at]))
        parts = tokens(answers, text)
        whole = replay(answers, parts)
        assert replay(answers, cut(parts, answers, rng)) == whole, text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>hello there"),
        ("glm45", "<tool_call>now"),
        ("glm45", "<tool_call>now\n<arg_"),
        ("minimax_m2", "<minimax:tool_call>\nhello"),
        ("minimax_m2", '<invoke name="unknown">\n</invoke>'),
        ("seed_oss", "<seed:tool_call>\n<function=no"),
        ("gemma4", "<|tool_call>call:now"),
        ("gemma4", "<|tool_call>call:{}"),
        ("granite", "<|tool_call|>[1]"),
        ("phi4_mini_json", "functools[0] is a module"),
        ("phi4_mini_json", "import functools"),
        ("hunyuan", "<tool_calls>\n<tool_call>now\n```json\n[1]\n```</tool_call>"),
        ("hunyuan_a13b", "<tool_calls>none</tool_calls>"),
        ("olmo3", "<function_calls>\nnow"),
        ("lfm2", "<|tool_call_start|>now<|tool_call_end|>"),
        ("nemotron_json", "<TOOLCALL>[1]</TOOLCALL>"),
        ("lfm2", "<|tool_call_start|>[other()]<|tool_call_end|>"),
        ("olmo3", "<function_calls>\n1 + 1\n</function_calls>"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    assert replay(formats(name), text) == Result("", text, [])


@pytest.mark.parametrize(
    ("name", "text", "calls", "rest"),
    [
        ("glm45", "<tool_call>now</tool_call>", [("now", "{}")], ""),
        (
            "glm45",
            "<tool_call>search-web <arg_key>text</arg_key> <arg_value>12</arg_value></tool_call>",
            [("search-web", '{"text": "12"}')],
            "",
        ),
        (
            "glm47",
            "<tool_call>get_weather<arg_key>count</arg_key><arg_value>12</arg_value><arg_key>text",
            [("get_weather", '{"count": 12')],
            "",
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="x">\n'
            '<parameter name="a">1</parameter></invoke>\n</minimax:tool_call> b',
            [("now", "{}"), ("x", '{"a": 1}')],
            "b",
        ),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=search-web>\n<parameter=text>\na\n</parameter>\n</function>\n</seed:tool_call>",
            [("search-web", '{"text": "\\na\\n"}')],
            "",
        ),
        (
            "gemma4",
            '<|tool_call>call:now{a:<|"|>{"b": }<|"|>,c:None,"d":"e\\n",<|"|>f g<|"|>:True,h:[1,],}<tool_call|>',
            [("now", '{"a": "{\\"b\\": }", "c": null, "d": "e\\n", "f g": true, "h": [1]}')],
            "",
        ),
        ("gemma4", "<|tool_call>call:now{a:1 b:2}<tool_call|>", [("now", '{"a": "1 b:2"}')], ""),
        ("gemma4", "<|tool_call>call:now{a:[1,{b:2},]<tool_call|> x", [("now", '{"a": [1, {"b": 2}]}')], "x"),
        ("gemma4", "<|tool_call>call:now{a:1,=}<tool_call|>", [("now", '{"a": 1}')], ",=}<tool_call|>"),
        ("gemma4", "<|tool_call>call:now" + "{a:" * 99, [("now", '{"a": ' * 64 + "}" * 64)], "{a:" * 35),
        ("granite", '<|tool_call|>[{"name": "now"}, {"name": "x", "arguments": {}}]', [("now", "{}"), ("x", "{}")], ""),
        ("granite", '<tool_call>{"name": "now", "arguments": {"a": 1}}', [("now", '{"a": 1}')], ""),
        ("phi4_mini_json", 'functools[{"name": "now", "arguments": {"a": 1}}]', [("now", '{"a": 1}')], ""),
        (
            "phi4_mini_json",
            '<|tool_call|>[{"type": "function", "name": "now", "parameters": {}}]<|/tool_call|>',
            [("now", "{}")],
            "",
        ),
        ("hunyuan", '<tool_calls>\n<tool_call>now\n{"a": 1}</tool_call>\n</tool_calls>', [("now", '{"a": 1}')], ""),
        ("hunyuan", '<tool_calls>[{"name": "now"}]</tool_calls>', [("now", "{}")], ""),
        ("hunyuan_a13b", "<tool_call>now\n```json\n{}\n```</tool_call>", [("now", "{}")], ""),
        ("olmo3", "<function_calls>\nnow()\nnow(a='x')\n</function_calls>", [("now", "{}"), ("now", '{"a": "x"}')], ""),
        (
            "olmo3",
            "<function_calls>[now(), other(a=1)]</function_calls>",
            [("now", "{}")],
            ", other(a=1)]</function_calls>",
        ),
        ("olmo3", "<function_calls>other(a=null)</function_calls>", [("other", '{"a": null}')], ""),
        ("lfm2", "<|tool_call_start|>now(a='x')<|tool_call_end|>b", [("now", '{"a": "x"}')], "b"),
        ("lfm2", '<|tool_call_start|>{"name": "now", "arguments": {}}<|tool_call_end|>', [("now", "{}")], ""),
        (
            "lfm2",
            '<|tool_call_start|>[ {"name": "now"}, {"name": "x", "arguments": {}}]<|tool_call_end|>b',
            [("now", "{}"), ("x", "{}")],
            "b",
        ),
        ("nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>b', [("now", "{}")], "b"),
        (
            "lfm2",
            "<|tool_call_start|>[now(), now(a='x')]<|tool_call_end|>I look.",
            [("now", "{}"), ("now", '{"a": "x"}')],
            "I look.",
        ),
    ],
)
def test_broken_calls_keep_what_can_be_understood(
    name: str, text: str, calls: list[tuple[str, str]], rest: str
) -> None:
    found = replay(formats(name), [text])
    assert (found.calls, found.text) == (calls, rest)
    assert replay(formats(name), text) == found


def test_a_quotation_in_letters_ends_no_value_where_the_vocabulary_has_the_marker() -> None:
    answers = formats("gemma4", MARKERS["gemma4"])
    pieces = ["<|tool_call>", "call:now{a:", '<|"|>', "x<", '|"|>y}', '<|"|>', "}", "<tool_call|>"]
    assert replay(answers, pieces, ReasoningState.BEHIND).calls == [("now", '{"a": "x<|\\"|>y}"}')]
    answers = formats("glm45", MARKERS["glm45"])
    pieces = ["<tool_call>", "now\n", "<arg_key>", "a", "</arg_key>", "\n", "<arg_value>", "x</arg_", "value>"]
    pieces += ["</arg_value>", "\n", "</tool_call>"]
    assert replay(answers, pieces, ReasoningState.BEHIND).calls == [("now", '{"a": "x</arg_value>"}')]


def test_a_tag_that_is_a_token_ends_a_value_whose_own_end_is_missing() -> None:
    answers = formats("glm45", MARKERS["glm45"])
    text = "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>x<arg_key>b</arg_key><arg_value>2</tool_call>"
    found = replay(answers, tokens(answers, text), ReasoningState.BEHIND)
    assert found == Result("", "", [("now", '{"a": "x", "b": 2}')])
