"""Answers that end anywhere, or are no calls after all: nothing raises, and nothing is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.parsing.answers import WRITERS, random_answer
from support.parsing.replay import Result, cut, formats, replay, tokens

TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
PARSERS = sorted({parser for parser, _ in WRITERS.values()})

# Tracing would make many thousands of replays take twice as long; other tests reach the same lines.

every_format = pytest.mark.parametrize("name", WRITERS)
every_parser = pytest.mark.parametrize("parser", PARSERS)


@every_format
def test_answers_that_are_cut_anywhere_are_beginnings_of_the_whole(name: str) -> None:
    parser, write = WRITERS[name]
    rng = random.Random(name)
    answers = formats(parser)
    for _ in range(60):
        text = write(random_answer(rng), rng)
        whole = replay(answers, [text])
        for end in range(len(text)):
            found = replay(answers, [text[:end]])
            names = [name for name, _ in found.calls]
            assert names == [name for name, _ in whole.calls][: len(names)]
            complete = zip(found.calls[:-1], whole.calls, strict=False)
            assert all(one == other for one, other in complete), text[:end]
            if not end % 16:
                assert replay(answers, text[:end]) == found, "letter by letter"


@every_format
def test_arguments_that_are_cut_are_the_beginning_of_whole_ones(name: str) -> None:
    """Values of formats with other literals than JSON's are converted when they are complete."""
    parser, write = WRITERS[name]
    rng = random.Random(name)
    answers = formats(parser)
    for _ in range(60):
        answer = random_answer(rng)
        text = write(answer, rng)
        whole = replay(answers, [text])
        values = [value for call in answer.calls for value in call.arguments.values()]
        if name == "pythonic" and not all(isinstance(value, str) for value in values):
            continue
        if name == "qwen_xml" and None in values:
            # The beginning of a null may be that of a string.
            continue
        for end in range(len(text)):
            if text[:end].rstrip().endswith("</parameter>"):
                # It ends the value, though more of it would follow.
                continue
            found = replay(answers, [text[:end]])
            for (_, part), (_, full) in zip(found.calls, whole.calls, strict=False):
                assert full.startswith(part), text[:end]


SOUP = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<function=", "<function=now>", "</function>", "<parameter=text>"),
            *("</parameter>", "<parameter=", '{"name": "now"', '"arguments": ', '"parameters": ', "{", "}", "[", "]"),
            *('"', "'", "\\", "\\u", "\\ud83d", "\\ude00", "\\x4", "\\N{", ",", ":", "(", ")", "=", ";", "\n", " "),
            *("now(", "now()", "text=", "get_weather", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
            *("<think>", "</think>", "[THINK]", "[/THINK]", "null", "12", "-", "true", "None", "é", "🙂", "x", "\x00"),
        ]
    ),
    max_size=30,
)


@every_parser
@settings(max_examples=400, deadline=None)
@given(pieces=SOUP, has_tokens=st.booleans(), seed=st.integers(0, 9))
def test_any_soup_of_syntax_gives_the_same_output_in_pieces(
    parser: str, pieces: list[str], has_tokens: bool, seed: int
) -> None:
    answers = formats(parser, TOKENS if has_tokens else ())
    text = "".join(pieces)
    parts = tokens(answers, text)
    whole = replay(answers, parts)
    assert replay(answers, cut(parts, answers, random.Random(seed))) == whole
    if not whole.calls and not whole.reasoning and not has_tokens:
        # Markers alone are left out, and line breaks behind empty reasoning.
        assert whole.text in (text, text[: len(whole.text)], text[-len(whole.text) or len(text) :])


@every_parser
@settings(max_examples=300, deadline=None)
@given(pieces=SOUP)
def test_text_without_tools_and_reasoning_stays_as_it_is(parser: str, pieces: list[str]) -> None:
    text = "x" + "".join(pieces)
    assert replay(formats(parser), pieces=["x", *pieces], tools=None) == Result("", text, [])


DAMAGE = (
    *("{", "}", "[", "]", ",", ":", "'", '"', "\\", "\n", " ", ";", "(", ")", "=", "\x00", "\\ud83d", "\\u12", "```"),
    *("True", "None", "NaN", "null", "1e999", "<tool_call>", "</tool_call>", "<function=now>", "</function>"),
    *("<parameter=text>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
)


@every_format
def test_damaged_calls_give_the_same_output_in_pieces(name: str) -> None:
    parser, write = WRITERS[name]
    rng = random.Random(name)
    answers = formats(parser)
    for _ in range(150):
        text = write(random_answer(rng), rng)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            damaged = (
                text[:at] + rng.choice(DAMAGE) + text[at:],
                text[:at] + text[at + rng.randint(1, 6) :],
                text.replace('"', "'", rng.randint(1, 9)),
                text[:at],
                text[:at] + text[max(at - rng.randint(1, 20), 0) :],
            )
            text = rng.choice(damaged)
        whole = replay(answers, [text])
        assert replay(answers, text) == whole, text
        assert replay(answers, [text[at : at + 3] for at in range(0, len(text), 3)]) == whole, text


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>\nnone"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", '<tool_call>{name: "now"}</tool_call>'),
        ("hermes", '<tool_call>{"na'),
        ("hermes", '<tool_call>\n{"name": "now'),
        ("hermes", "a <tool_"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=no"),
        ("qwen3_coder", "<tool_call>\nhello"),
        ("qwen3_coder", "<function=unknown>\n</function>"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"color": 3, "name": "now"}'),
        ("llama3_json", '{"city": "Bonn", "name": "now"}'),
        ("llama3_json", 'It is {"name": "now", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '{"name": "no'),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now"),
        ("pythonic", "see [now()]"),
        ("pythonic", "[1, 2]"),
        ("mistral", "[TOOL_CALLS]"[:-1]),
        ("mistral", "[TOOL_CALLS]now"),
        ("mistral", "[TOOL_CALLS] hello there"),
        ("mistral", "[TOOL_CALLS][1]"),
    ],
)
def test_what_only_looks_like_a_call_is_text(parser: str, text: str) -> None:
    assert replay(formats(parser), text) == Result("", text, [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\n"),
        ("mistral", "[TOOL_CALLS]"),
        ("qwen3_coder", "<tool_call>"),
    ],
)
def test_a_marker_alone_is_neither_text_nor_a_call(parser: str, text: str) -> None:
    assert replay(formats(parser), [text]) == Result("", "", [])
    assert replay(formats(parser, TOKENS), tokens(formats(parser, TOKENS), text)) == Result("", "", [])


@pytest.mark.parametrize(
    ("parser", "text", "calls", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', [("now", "{}")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call> b', [("now", '{"a": 1}')], "b"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call>', [("now", '{"a": 1')], ""),
        ("hermes", '<tool_call>{"name": "now"}', [("now", "{}")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("now", '{"a": 1}')], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>', [("now", "3")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": "\\x"}</tool_call>', [("now", "\\x")], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\u12', [("now", "{")], ""),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "{\\u12G4 and more"}</tool_call>',
            [("now", "{")],
            '\\u12G4 and more"}</tool_call>',
        ),
        ("hermes", '<tool_call>{"name": "n\\q"}</tool_call>', [], '<tool_call>{"name": "n\\q"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": }</tool_call>', [("now", "{}")], ""),
        (
            "hermes",
            '<tool_call>{"id": 1, "arguments": {"a": []}, "name": "now"}</tool_call>',
            [("now", '{"a": []}')],
            "",
        ),
        ("hermes", '<tool_call>{"name": "now"} and </tool_c', [("now", "{}")], "and </tool_c"),
        ("hermes", '<tool_call>{"name": "now"}</tool_c', [("now", "{}")], ""),
        ("hermes", '<tool_call>{"name": "now", "x" 1}</tool_call>', [("now", "{}")], ', "x" 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "n\\u00f6w"}</tool_call>', [("nöw", "{}")], ""),
        ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call></tool_call>', [("now", "{}")], ""),
        ("qwen3_coder", "<function=now>\n</function>", [("now", "{}")], ""),
        ("qwen3_coder", "<tool_call><function=now></tool_call>", [("now", "{}")], ""),
        (
            "qwen3_coder",
            "<tool_call>\n<function=search-web>\n<parameter=text>\na\n</function>\n</tool_call>",
            [("search-web", '{"text": "a"}')],
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=count>many</parameter><parameter=flag>True</parameter>"
            "<parameter=list>[1, 'a', None]</parameter><parameter=deep>{1}</parameter></function></tool_call>",
            [("get_weather", '{"count": "many", "flag": true, "list": [1, "a", null], "deep": "{1}"}')],
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=x><parameter=a>1</parameter><parameter=b>hi</parameter> ups",
            [("x", '{"a": 1, "b": "hi</parameter> ups')],
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=x><parameter=a>1</parameter></tool_call>\n"
            "<tool_call><function=y><parameter=b>2</parameter>\n</tool_call> ",
            [("x", '{"a": 1}'), ("y", '{"b": 2}')],
            "",
        ),
        ("llama3_json", '{"name": "now", "parameters": {}}; later', [("now", "{}")], "; later"),
        ("llama3_json", 'Yes:\n  {"name": "now"}\n{"x": 1}', [("now", "{}")], 'Yes:\n  {"x": 1}'),
        ("llama3_json", '<|python_tag|>{"name": "other"}', [("other", "{}")], ""),
        ("pythonic", "[now(), now(a=1), oops(]", [("now", "{}"), ("now", '{"a": 1}')], ", oops(]"),
        ("pythonic", "[now(a=1 b=2)]", [("now", '{"a": "1 b=2"}')], ""),
        ("pythonic", "[now(a='x' 'y')]", [("now", '{"a": "x"}')], "'y')]"),
        (
            "pythonic",
            '[now(a=true, b=[1, None], c=f(2), d=(1,), e="""q\'\n""", f=\'\', g=\'\\x41\\q\\101\')]',
            [
                (
                    "now",
                    '{"a": true, "b": [1, null], "c": "f(2)", "d": [1], "e": "q\'\\n", "f": "", "g": "A\\\\qA"}',
                )
            ],
            "",
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "now"}, 3]', [("now", "{}")], ", 3]"),
        ("mistral", '[TOOL_CALLS]{"name": "now"}', [("now", "{}")], ""),
        ("mistral", '[TOOL_CALLS]now{"a": 1} b', [("now", '{"a": 1}')], "b"),
        ("mistral", "[TOOL_CALLS]now[ARGS] none", [("now", "none")], ""),
        ("mistral", "[TOOL_CALLS]now[ARGS] (none)", [("now", "{}")], "(none)"),
        ("llama3_json", '{"name": "now", "color": 3}', [("now", "{}")], ', "color": 3}'),
        ("pythonic", "[now(a='\\xZ\\N{no}\\U00110000')]", [("now", '{"a": "\\\\xZ\\\\N{no}\\\\U00110000"}')], ""),
    ],
)
def test_broken_calls_keep_what_can_be_understood(
    parser: str, text: str, calls: list[tuple[str, str]], rest: str
) -> None:
    found = replay(formats(parser), [text])
    assert (found.calls, found.text) == (calls, rest)
    assert replay(formats(parser), text) == found


def test_identifiers_of_mistral_have_nine_letters_and_digits() -> None:
    from minisgl.parsing.output import short_call_id

    assert len(short_call_id()) == 9 and short_call_id().isalnum()
