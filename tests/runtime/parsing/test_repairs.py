"""Arguments that are not quite JSON: what a model certainly means is repaired, anything else stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.parsing.json_text import Repair, repaired
from support.parsing.replay import formats, replay

WRITERS = {
    "hermes": ("hermes", '<tool_call>{"name": "now", "arguments": %s}</tool_call>'),
    "hermes in Python": ("hermes", "<tool_call>{'arguments': %s, 'name': 'now', 'type': 'function',}</tool_call>"),
    "llama": ("llama3_json", '{"name": "now", "parameters": %s}'),
    "llama behind its tag": ("llama3_json", "<|python_tag|>{'name': 'now', 'parameters': %s}"),
    "mistral": ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": %s}]'),
    "mistral by name": ("mistral", "[TOOL_CALLS]now[ARGS]%s"),
    "xml": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=deep>%s</parameter></function></tool_call>",
    ),
    "pythonic": ("pythonic", "[now(deep=%s)]"),
}

every_writer = pytest.mark.parametrize("name", WRITERS)


def arguments(name: str, text: str) -> str:
    """Return the arguments of the one call, which are the same in any pieces."""
    parser, written = WRITERS[name]
    answer = written % text
    found = replay(formats(parser), [answer])
    assert found == replay(formats(parser), answer), "letter by letter"
    assert found.text == ""
    ((_, read),) = found.calls
    return read


@every_writer
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, {"b": 2 , } ,\n], }', {"a": [1, {"b": 2}]}),
        ("{'a': 'b'}", {"a": "b"}),
        ("{'a': 'say \"it\\'s\"\\n', \"b\": ['}', \"'\"]}", {"a": 'say "it\'s"\n', "b": ["}", "'"]}),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
        ("{'a': 'True, None,]', 'b': {'c': None,},}", {"a": "True, None,]", "b": {"c": None}}),
        ("{'a': 'line\n\ttab'}", {"a": "line\n\ttab"}),
        ('{"a": "it\\\'s"}', {"a": "it's"}),
    ],
)
def test_what_is_certain_is_repaired(name: str, text: str, value: Any) -> None:
    read = json.loads(arguments(name, text))
    assert read in (value, {"deep": value})


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("xml", "pythonic")])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": foo}',
        '{"a": NaN}',
        '{"a": [1,,]}',
        '{"a": xTrue}',
        "{a: 1}",
        '{"a": "\\q"}',
        "[1]",
        '{"a": -None}',
        "{,}",
        '{"a": [ , ]}',
    ],
)
def test_what_is_not_certain_stays_as_it_is(name: str, text: str) -> None:
    read = arguments(name, text)
    # Of two commas, the second one certainly is too much, but the first one is not.
    assert read == text.replace(",,", ",").replace("-None", "-null")


@pytest.mark.parametrize("text", ["(1)", "<none>", "*"])
def test_arguments_that_cannot_be_read_are_not_taken_for_none(text: str) -> None:
    found = replay(formats("hermes"), [f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>'])
    assert found.calls == [("now", text[0])]


def test_an_apostrophe_within_a_word_begins_no_string() -> None:
    found = replay(formats("hermes"), ['<tool_call>{"name": "now", "arguments": {"a": it\'s}}</tool_call> Done.'])
    assert found.calls == [("now", '{"a": it')] and found.text.endswith("Done.")


@pytest.mark.parametrize(
    ("parser", "text", "read"),
    [
        # Without its comma, the rest must not be lost.
        ("hermes", '<tool_call>{"name": "now" "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
        ("llama3_json", '{"name": "now"\n"parameters": {"a": 1}}', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "now", "parameters": null, "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"parameters": {"a": 1}, "name": "now", "arguments": null}</tool_call>', '{"a": 1}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]null", "{}"),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
            '{"a": "\\ud83d"}',
        ),
        ("qwen3_coder", '<tool_call>\n<function=now>{"a": True,}</function>\n</tool_call>', '{"a": true}'),
        (
            "qwen3_coder",
            '<function=now>\n{"a": "</function>"}\n</function></function></tool_call>',
            '{"a": "</function>"}',
        ),
        ("qwen3_coder", "<function=now><parameter=a>\nb\n</parameter></function>\n</function>", '{"a": "b"}'),
    ],
)
def test_arguments_are_found_where_the_syntax_around_them_is_broken(parser: str, text: str, read: str) -> None:
    found = replay(formats(parser), [text])
    assert (found.calls, found.text) == ([("now", read)], "")
    assert replay(formats(parser), text) == found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


@given(VALUES)
def test_valid_texts_and_literals_keep_their_value(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert repaired(text) == text


@given(st.text("\"'\\,[]{}: \nTrueNonx1", max_size=30), st.integers(0, 30))
def test_a_repair_is_the_same_in_any_pieces(text: str, at: int) -> None:
    whole = repaired(text)
    letters, halves = Repair(), Repair()
    assert "".join(map(letters.push, text)) + letters.finish() == whole
    assert halves.push(text[:at]) + halves.push(text[at:]) + halves.finish() == whole
