"""Calls in reasoning that was not closed: they count where nothing else answers, and quotations never do."""

from __future__ import annotations

import json

import pytest

from minisgl.parsing.reasoning import ReasoningState
from support.parsing.replay import Result, formats, replay, tokens

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {}}',
}
HERMES = CALLS["hermes"]

every_parser = pytest.mark.parametrize("parser", CALLS)
with_tokens = pytest.mark.parametrize("vocabulary", [(), MARKERS])


def scanned(parser: str, vocabulary: tuple[str, ...], text: str, is_open: bool = False, **options: bool) -> Result:
    answers = formats(parser, vocabulary)
    state = ReasoningState.WITHIN if is_open else ReasoningState.BEFORE
    parts = tokens(answers, text)
    whole = replay(answers, parts, state, **options)
    pieces = [piece for part in parts for piece in ([part] if part in vocabulary else part)]
    assert replay(answers, pieces, state, **options) == whole
    return whole


@every_parser
@with_tokens
@pytest.mark.parametrize("is_open", [True, False])
def test_a_call_ends_reasoning_that_is_still_open(parser: str, vocabulary: tuple[str, ...], is_open: bool) -> None:
    think = "" if is_open else "<think>\n"
    call = CALLS[parser]
    for text in (f"hm\n{call}", f"hm\n\n{call}\n", f"hm\n{call}\n</think>", f"hm\n{call}\n</think>\n\n"):
        assert scanned(parser, vocabulary, think + text, is_open) == Result("hm", "", [("now", "{}")])
    assert scanned(parser, vocabulary, f"{think}{call}", is_open) == Result("", "", [("now", "{}")])
    assert scanned(parser, vocabulary, f"{think}hm\n{call}\n{call}", is_open).calls == [("now", "{}")] * 2
    assert scanned(parser, vocabulary, f"{think}hm\n{call}\nDone", is_open) == Result("hm", "Done", [("now", "{}")])


@every_parser
@with_tokens
def test_calls_that_are_rehearsed_are_reasoning(parser: str, vocabulary: tuple[str, ...]) -> None:
    call = CALLS[parser]
    found = scanned(parser, vocabulary, f"<think>\nhm\n{call}\nso be it\n</think>\n\n{call}")
    assert found.calls == [("now", "{}")]
    assert found.reasoning.startswith("hm\n") and found.reasoning.endswith("\nso be it")
    found = scanned(parser, vocabulary, f"<think>\nhm\n{call}\n</think>\n\nIt is late.")
    assert (found.text, found.calls) == ("It is late.", [])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
@with_tokens
@pytest.mark.parametrize("is_open", [True, False])
def test_a_call_behind_words_in_its_line_counts_where_nothing_follows(
    parser: str, vocabulary: tuple[str, ...], is_open: bool
) -> None:
    think = "" if is_open else "<think>\n"
    call = CALLS[parser]
    for gap in ("", " "):
        for end in ("", "\n", "\n</think>", "</think>\n\n"):
            found = scanned(parser, vocabulary, f"{think}hm:{gap}{call}{end}", is_open)
            assert found == Result("hm:", "", [("now", "{}")])
        assert scanned(parser, vocabulary, f"{think}hm:{gap}{call}{call} {call}", is_open).calls == [("now", "{}")] * 3
        for end in (" is it", "\nDone", "`", "</think>\n\nYes", f"\nor\n{call}\n</think>\n\nYes"):
            assert scanned(parser, vocabulary, f"{think}hm:{gap}{call}{end}", is_open).calls == []
    assert scanned(parser, vocabulary, f"{think}`{call}", is_open).calls == []


@with_tokens
@pytest.mark.parametrize("before", ["hm\n", "hm "])
def test_the_marker_that_ends_reasoning_is_part_of_arguments(vocabulary: tuple[str, ...], before: str) -> None:
    text = "a </think> b\n</think>\n"
    json_call = f'<tool_call>\n{{"name": "now", "arguments": {{"t": {json.dumps(text)}}}}}\n</tool_call>'
    xml = f"<tool_call>\n<function=now>\n<parameter=t>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for parser, call in (("hermes", json_call), ("qwen3_coder", xml)):
        for end in ("", "\n</think>\n"):
            found = scanned(parser, vocabulary, f"<think>\n{before}{call}\n{call}{end}")
            assert (found.reasoning, found.text) == ("hm", "")
            assert [json.loads(arguments) for _, arguments in found.calls] == [{"t": text}] * 2
        found = scanned(parser, vocabulary, f"<think>\n{before}{call}\n</think>\n\nNo need.")
        assert (found.text, found.calls) == ("No need.", [])


@with_tokens
def test_a_call_that_never_ends_does_not_keep_the_answer(vocabulary: tuple[str, ...]) -> None:
    found = scanned("hermes", vocabulary, '<think>\n<tool_call>{"name": "now", "arguments": {"a": "b\n</think>\n\nYes')
    assert (found.text, found.calls) == ("Yes", [])


@with_tokens
@pytest.mark.parametrize(
    "thought",
    [
        f"I could write `{HERMES}` here",
        f"I could write {HERMES} here",
        f"The format is:\n```\n{HERMES}\n```",
        "The marker\n<tool_call>\nbegins calls",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "no',
        "a </tool_call> b",
    ],
)
def test_quoted_markers_stay_reasoning(thought: str, vocabulary: tuple[str, ...]) -> None:
    assert scanned("hermes", vocabulary, f"<think>\n{thought}") == Result(thought, "", [])
    assert scanned("hermes", vocabulary, f"<think>\n{thought}\n</think>\n\nYes") == Result(thought, "Yes", [])


def test_reasoning_within_the_text_is_ended_by_a_call_too() -> None:
    found = scanned("hermes", (), f"<think>\nhm\n{HERMES}\nend", separate_reasoning=False)
    assert found == Result("", "<think>\nhm\nend", [("now", "{}")])


def test_a_call_of_mistral_ends_reasoning_in_its_line() -> None:
    for vocabulary in ((), MARKERS):
        found = scanned("mistral", vocabulary, "[THINK]hm[TOOL_CALLS]now[ARGS]{}")
        assert found == Result("hm", "", [("now", "{}")])
