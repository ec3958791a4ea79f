"""Answers in channels: reasoning, calls and text, whole and cut anywhere, and what a model may get wrong in them."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.reasoning import ReasoningState
from support.parsing.channels import AS_TEXT, AS_TOKENS, IDS, Quoted, pieces, regrouped, replay
from support.parsing.replay import Result

HEAD: Final = "<|start|>assistant"
THOUGHT: Final = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL: Final = "<|channel|>final<|message|>Hello<|return|>"
CALL: Final = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"text": "Bonn"}<|call|>'
WEATHER: Final = ("get_weather", '{"text": "Bonn"}')

every_vocabulary = pytest.mark.parametrize("answers", [AS_TOKENS, AS_TEXT], ids=["tokens", "text"])


@every_vocabulary
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FINAL, Result("", "Hello", [])),
        (THOUGHT + HEAD + FINAL, Result("Hm.", "Hello", [])),
        (HEAD + THOUGHT + HEAD + FINAL, Result("Hm.", "Hello", [])),
        (THOUGHT + HEAD + CALL, Result("Hm.", "", [WEATHER])),
        (
            f"{THOUGHT}{HEAD}<|channel|>commentary<|message|>I look.<|end|>{HEAD}{CALL}",
            Result("Hm.", "I look.", [WEATHER]),
        ),
        (f"{THOUGHT}{HEAD}{THOUGHT}{HEAD}{FINAL}", Result("Hm.\n\nHm.", "Hello", [])),
        (f"<|channel|>commentary<|message|>I look.<|end|>{HEAD}{FINAL}", Result("", "I look.\n\nHello", [])),
        (f"{CALL}{HEAD}{CALL}", Result("", "", [WEATHER, WEATHER])),
        ("<|channel|>final<|message|><|return|>", Result("", "", [])),
        ("", Result("", "", [])),
    ],
)
def test_channels_are_reasoning_calls_and_text(answers: AnswerFormat, text: str, expected: Result) -> None:
    assert replay(answers, [*pieces(text)]) == expected


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json",
        "<|channel|>commentary to=functions.get_weather json",
        "<|channel|>commentary to=functions.get_weather",
        "<|channel|>analysis to=functions.get_weather code",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather",
        "<|channel|>commentary to=get_weather <|constrain|>json",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json",
        " <|channel|> commentary \n to=functions.get_weather <|constrain|> json ",
    ],
)
@every_vocabulary
def test_a_call_has_its_recipient_before_or_behind_the_channel(answers: AnswerFormat, header: str) -> None:
    found = replay(answers, pieces(f'{header}<|message|>\n{{"text": "Bonn"}} \n<|call|>'))
    assert found == Result("", "", [WEATHER])


def test_any_name_in_the_namespace_of_functions_is_a_call() -> None:
    found = replay(AS_TOKENS, pieces("<|channel|>commentary to=functions.other<|message|>{}<|call|>"))
    assert found.calls == [("other", "{}")]


def test_a_call_without_arguments_has_an_empty_object_unless_it_was_cut() -> None:
    call = pieces("<|channel|>commentary to=functions.now<|message|>")
    assert replay(AS_TOKENS, [*call, "<|call|>"]).calls == [("now", "{}")]
    assert replay(AS_TOKENS, call).calls == [("now", "{}")]
    assert replay(AS_TOKENS, call, is_cut=True).calls == [("now", "")]


def test_a_call_that_is_cut_keeps_what_there_is_of_it() -> None:
    found = replay(AS_TOKENS, pieces(CALL[:-12]), is_cut=True)
    assert found == Result("", "", [("get_weather", '{"text": "Bo')])


def test_arguments_are_repaired_where_it_is_certain_what_they_mean() -> None:
    text = '<|channel|>commentary to=functions.now<|message|>{\'a\': True, "b": "1\n2",}<|call|>'
    assert replay(AS_TOKENS, pieces(text)).calls == [("now", '{"a": true, "b": "1\\n2"}')]


@every_vocabulary
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there", Result("", "Hello there", [])),
        ("<|channel|>thoughts<|message|>Hm.<|end|>", Result("", "thoughtsHm.", [])),
        ("<|channel|>analysis and more<|message|>Hm.", Result("", "analysis and moreHm.", [])),
        ("<|channel|>analysis", Result("", "analysis", [])),
        ("<|channel|>", Result("", "", [])),
        ("<|start|>user<|message|>Hi<|end|>", Result("", "userHi", [])),
        (f"<|channel|>final<|message|>Hello{HEAD} says<|return|>", Result("", "Helloassistant says", [])),
        (f"{THOUGHT}\n {HEAD}\n{FINAL}", Result("Hm.", "Hello", [])),
        (f"{THOUGHT}I say {FINAL}", Result("Hm.", "I say \n\nHello", [])),
        (f"<|channel|>analysis<|message|>Hm.{HEAD}{FINAL}", Result("Hm.", "Hello", [])),
        (f"<|channel|>analysis<|message|>Hm.{FINAL}", Result("Hm.", "Hello", [])),
        ("<|channel|>analysis<|message|>Hm <|channel|>x y.", Result("Hm x y.", "", [])),
        ("<|message|>Hello", Result("", "Hello", [])),
        (f"<|end|><|return|>{FINAL}", Result("", "Hello", [])),
        (f"<|channel|>{'a' * 300}<|message|>b", Result("", f"{'a' * 300}b", [])),
        (f"<|channel|>final to=functions.{'a' * 300}<|message|>b", Result("", f"final to=functions.{'a' * 300}b", [])),
        (
            "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
            Result("", "commentary to=python codeprint(1)", []),
        ),
        ("<|channel|>analysis to=python<|message|>1<|end|>", Result("analysis to=python1", "", [])),
    ],
)
def test_what_is_no_header_is_text(answers: AnswerFormat, text: str, expected: Result) -> None:
    found = replay(answers, pieces(text))
    if answers is AS_TEXT:
        # Nothing hides a marker that is text, where it separates nothing.
        found = Result(without_markers(found.reasoning), without_markers(found.text), found.calls)
    assert found == expected


def without_markers(text: str) -> str:
    return re.sub("|".join(map(re.escape, IDS)), "", text)


def test_markers_in_ordinary_tokens_are_text() -> None:
    text = "<|channel|>final<|message|>a<|end|>"
    assert replay(AS_TOKENS, [Quoted(text)]).text == text
    assert replay(AS_TOKENS, [*pieces("<|channel|>final<|message|>"), Quoted(text)]).text == text
    header: list[str | Quoted] = ["<|channel|>", "final ", Quoted("<|constrain|>"), "json", "<|message|>", "b"]
    assert replay(AS_TOKENS, header).text == "final <|constrain|>jsonb"


def test_without_tools_the_text_has_the_header_of_a_call() -> None:
    found = replay(AS_TOKENS, pieces(CALL), tools=None)
    assert found == Result("", 'commentary to=functions.get_weather json{"text": "Bonn"}', [])


def test_without_separation_only_calls_are_taken_out() -> None:
    text = f"{THOUGHT}{HEAD}<|channel|>commentary<|message|>I look.<|end|>{HEAD}{CALL}"
    found = replay(AS_TOKENS, pieces(text), separate_reasoning=False, is_visible=True)
    assert found == Result("", text.removesuffix(HEAD + CALL) + "<|call|>", [WEATHER])
    found = replay(AS_TOKENS, pieces(THOUGHT + HEAD + FINAL), separate_reasoning=False)
    assert found.text == "analysisHm.assistantfinalHello"


@pytest.mark.parametrize(
    ("state", "expected"),
    [(ReasoningState.WITHIN, Result("So.", "Hello", [])), (ReasoningState.BEHIND, Result("", "So.\n\nHello", []))],
)
def test_an_answer_continues_the_message_in_which_the_prompt_ends(state: ReasoningState, expected: Result) -> None:
    assert replay(AS_TOKENS, pieces(f"So.<|end|>{HEAD}{FINAL}"), state) == expected


WORDS: Final = (
    *("assistant", "analysis", "commentary", "final", "thoughts", "user", "json", "code", "functions.now"),
    *(" to=functions.now", " to=functions.search-web ", " to=python", "to=", " ", "\n", "Hm.", "é🙂", "a < b"),
    *('{"text": "a"}', "{'a': None,}", "{", "}", '"', "\\", "<|", "|>", "<|chan", "nel|>", "null", "x" * 300),
)
MESSAGES: Final = (THOUGHT, FINAL, CALL, HEAD, HEAD + THOUGHT, HEAD + FINAL, HEAD + CALL)
ANSWERS: Final = st.lists(st.sampled_from([*WORDS, *IDS, *IDS, *MESSAGES]), max_size=24).map("".join)


@settings(max_examples=150, deadline=None)
@given(
    text=ANSWERS,
    places=st.lists(st.integers(0, 1000), max_size=12),
    state=st.sampled_from(ReasoningState),
    options=st.fixed_dictionaries({"is_cut": st.booleans(), "separate_reasoning": st.booleans()}),
    has_tools=st.booleans(),
)
@every_vocabulary
def test_no_answer_raises_depends_on_cuts_or_loses_text(
    answers: AnswerFormat,
    text: str,
    places: list[int],
    state: ReasoningState,
    options: dict[str, Any],
    has_tools: bool,
) -> None:
    if not has_tools:
        options = {**options, "tools": None}
    parts = pieces(text)
    whole = replay(answers, regrouped(parts, []), state, **options)
    assert replay(answers, parts, state, **options) == whole
    assert replay(answers, regrouped(parts, places), state, **options) == whole
    if options["separate_reasoning"]:
        assert_nothing_is_lost(text, whole)


LEFT_OUT: Final = re.compile(
    rf"assistant|analysis|commentary|final|(to=)?functions\.|get_weather|search-web|now|json|code|functions\.|"
    rf"to=|[{{}}\"',:\s\\]|None|null|{'|'.join(map(re.escape, IDS))}"
)
"""Words of headers, and characters that a repair of arguments may change."""


def assert_nothing_is_lost(text: str, found: Result) -> None:
    def letters(*texts: str) -> list[str]:
        return sorted("".join(LEFT_OUT.sub("", text) for text in texts))

    arguments = [arguments for _, arguments in found.calls]
    assert letters(text) == letters(found.reasoning, found.text, *arguments)
