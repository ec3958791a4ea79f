"""Texts around calls stay apart, and nothing of the syntax of calls is left in them."""

from __future__ import annotations

import pytest

from support.parsing.replay import Result, formats, replay

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML = "<function=now>\n</function>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"First {NOW} and then {NOW} end", "First and then end"),
        (f"First{NOW} and then", "First and then"),
        (f"First{NOW}and then{NOW}end", "First and then end"),
        (f"First\n\n{NOW}\n{NOW}\nend", "First\n\nend"),
        (f" {NOW} end", "end"),
        (f"First {NOW} \n", "First"),
        (f"<think>\nhm\n</think>\n\n{NOW}\nend", "end"),
    ],
)
def test_words_before_and_behind_a_call_stay_apart(text: str, expected: str) -> None:
    found = replay(formats("hermes"), [text])
    assert found.text == expected
    assert replay(formats("hermes"), text) == found


@pytest.mark.parametrize(
    ("parser", "text", "names"),
    [
        ("hermes", f"{NOW}\n</tool_call>", "now"),
        ("hermes", f"<tool_call>\n{NOW}\n</tool_call>", "now"),
        ("hermes", '{"name": "now", "arguments": {"a": {}}}\n</tool_call>', "now"),
        ("hermes", '<tool_call>{"name": "now"}\n{"name": "search-web"}</tool_call>', "now search-web"),
        ("hermes", '<tool_call>{"name": "now"}, {"name": "search-web"}}</tool_call>', "now search-web"),
        ("hermes", '<tool_call>\n[{"name": "now"}, {"name": "other"},]\n</tool_call>', "now other"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1},}</tool_call>', "now"),
        ("qwen3_coder", f"{XML}\n</tool_call>", "now"),
        ("qwen3_coder", f"<tool_call>\n<tool_call>\n{XML}\n</tool_call>\n</tool_call>", "now"),
        ("qwen3_coder", f"<tool_call>\n{XML}\n<function=other></function>\n</tool_call>", "now other"),
        ("llama3_json", '{"name": "now", "parameters": {},}, {"name": "now"}', "now now"),
        ("llama3_json", '<|python_tag|>[{"name": "now"}, {"name": "other"}]', "now other"),
        ("pythonic", "[now(q='x',),]", "now"),
        ("pythonic", "[now(q='x', ), now() , ]", "now now"),
        ("mistral", '[TOOL_CALLS][{"name": "now"},]', "now"),
        ("mistral", '[TOOL_CALLS]{"name": "now"}; {"name": "now"}', "now now"),
    ],
)
def test_nothing_of_the_syntax_of_calls_is_left(parser: str, text: str, names: str) -> None:
    found = replay(formats(parser), [text])
    assert [name for name, _ in found.calls] == names.split()
    assert found.text == ""
    assert replay(formats(parser), text) == found


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "arguments": {}}',
        '{"name": "now", "arguments": {}}\n</tool',
        '{"name": "unknown", "arguments": {}}\n</tool_call>',
        'So {"name": "now", "arguments": {}}\n</tool_call>',
        '{"name": "now"',
    ],
)
def test_an_object_is_a_call_only_before_the_marker_that_ends_one(text: str) -> None:
    found = replay(formats("hermes"), [text])
    assert (found.calls, found.text) == ([], text)
    assert replay(formats("hermes"), text) == found


def test_a_quoted_call_is_text_where_the_markers_are_tokens() -> None:
    text = f"Write\n{NOW}\nto call it."
    answers = formats("hermes", ("<tool_call>", "</tool_call>"))
    assert replay(answers, text) == replay(answers, [text]) == Result("", text, [])
    pieces = ["Sure\n", '{"name": "now"}\n', "</tool_call>", " ok"]
    assert replay(answers, pieces) == Result("", "Sure\nok", [("now", "{}")])


def test_an_object_behind_a_call_whose_end_is_missing_is_text() -> None:
    text = '<tool_call>{"name": "now"}\n{"name": "Bob", "age": 3}'
    found = replay(formats("hermes"), [text])
    assert (found.calls, found.text) == ([("now", "{}")], '{"name": "Bob", "age": 3}')
