"""Calls written as text are read as the same calls."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from minisgl.parsing.call_text import call_text
from minisgl.parsing.reasoning import ReasoningState
from support.parsing.replay import formats, replay, tokens

ARGUMENTS: Final[dict[str, Any]] = {
    "text": "Bonn\n\"x\" 'y' </b>",
    "count": 2,
    "ratio": -0.5,
    "deep": {"a": [None, True]},
    "list": [1, "é"],
    "flag": False,
}
CALLS: Final[list[Any]] = [("get_weather", ARGUMENTS), ("now", {}), ("get_weather", {"text": ""})]


@pytest.mark.parametrize(
    ("parser", "vocabulary"),
    [
        ("hermes", ()),
        ("hermes", ("<tool_call>", "</tool_call>")),
        ("qwen3_coder", ()),
        ("llama3_json", ()),
        ("pythonic", ()),
        ("mistral", ("[TOOL_CALLS]",)),
        ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ],
)
def test_calls_are_read_as_they_were_written(parser: str, vocabulary: tuple[str, ...]) -> None:
    answers = formats(parser, vocabulary)
    for calls in (CALLS, CALLS[:1], CALLS[1:2]):
        found = replay(answers, tokens(answers, call_text(answers, calls)), ReasoningState.BEHIND)
        assert found.text.strip() == ""
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
