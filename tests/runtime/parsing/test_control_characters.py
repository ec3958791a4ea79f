"""Raw control characters in strings of calls, as models write the line breaks of files: arguments stay valid JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.parsing.replay import formats, replay

TEXT = 'a\nb\tc\x00d\x1fe\r\n"é" \\ / \'🙂'


def raw(text: str) -> str:
    """Return a JSON or Python string whose control characters are not escaped."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


NESTED = f'{{"t": {raw(TEXT)}, "l": [{raw(TEXT)}]}}'
CALLS = {
    "hermes": ("hermes", f'<tool_call>\n{{"name": "now", "arguments": {NESTED}}}\n</tool_call>'),
    "hermes before its name": ("hermes", f'<tool_call>{{"arguments": {NESTED}, "name": "now"}}</tool_call>'),
    "hermes in a string": (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {json.dumps(NESTED)}}}</tool_call>',
    ),
    "llama": ("llama3_json", f'{{"name": "now", "parameters": {NESTED}}}'),
    "llama behind its tag": ("llama3_json", f'<|python_tag|>{{"name": "now", "parameters": {NESTED}}}'),
    "mistral": ("mistral", f'[TOOL_CALLS][{{"name": "now", "arguments": {NESTED}}}]'),
    "mistral by name": ("mistral", f"[TOOL_CALLS]now[ARGS]{NESTED}"),
    "pythonic": ("pythonic", f"[now(t={raw(TEXT)}, l=[{raw(TEXT)}])]"),
}


@pytest.mark.parametrize("name", CALLS)
def test_raw_control_characters_are_escaped(name: str) -> None:
    parser, text = CALLS[name]
    found = replay(formats(parser), [text])
    assert found == replay(formats(parser), text), "letter by letter"
    assert found.text == ""
    (call,) = found.calls
    assert json.loads(call[1]) == {"t": TEXT, "l": [TEXT]}


@pytest.mark.parametrize(("key", "value"), [("deep", {"t": TEXT}), ("list", [TEXT])])
def test_they_are_escaped_in_values_of_tags(key: str, value: Any) -> None:
    written = f'{{"t": {raw(TEXT)}}}' if key == "deep" else f"[{raw(TEXT)}]"
    text = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = replay(formats("qwen3_coder"), [text]).calls
    assert json.loads(call[1]) == {key: value}


def test_a_backslash_before_a_raw_line_break_stays_one() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"t": "ls \\\n -l"}}</tool_call>'
    (call,) = replay(formats("hermes"), text).calls
    assert json.loads(call[1]) == {"t": "ls \\\n -l"}
