"""Events of streams, for clients that end a line wherever Unicode does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks

TEXT = "a\u2028b\u2029c\x85d\x1ee\x0bf\n é…–"
"""All characters at which `str.splitlines` ends a line, and others with the same first bytes."""
TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
USER = [{"role": "user", "content": "Hi"}]
CASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {
        "messages": USER,
        "max_tokens": 99,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled"},
    },
    "/generate": {"text": "Hi"},
}


def texts(value: Any) -> set[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {text for part in value for text in texts(part)}
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("path", CASES)
def test_line_separators_in_an_answer_end_no_line_of_a_stream(scripted: ScriptedStack, path: str) -> None:
    steps = [says(TEXT), says(TEXT + "2")]
    if "tools" in CASES[path]:
        steps = [thinks(TEXT + "t"), *steps, *calls(0, "f", '{"a": "', TEXT + "c", '"}')]
    scripted.script = answer(*steps)
    with scripted.http.stream("POST", path, json={**CASES[path], "stream": True}) as response:
        lines = list(response.iter_lines())
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    found = "\0".join(text for data in datas if data != "[DONE]" for text in texts(json.loads(data)))
    # Texts that arrive at once may share an event.
    assert TEXT + "2" in found
    if "tools" in CASES[path]:
        assert TEXT + "t" in found and TEXT + "c" in found
    assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)
