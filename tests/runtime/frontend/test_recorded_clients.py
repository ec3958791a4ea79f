"""Requests of clients that are not installed for tests, as they sent them to this server.

`recorded/CLIENT.jsonl` has a request per line; long texts were cut. e2e/clients runs the clients themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.wire.text import Generate
from support.frontend.scripted import ScriptedStack, answer, says

RECORDED = Path(__file__).parent / "recorded"
REQUESTS = [
    pytest.param(file.stem, json.loads(line), id=f"{file.stem} {number}")
    for file in sorted(RECORDED.glob("*.jsonl"))
    for number, line in enumerate(file.read_text().splitlines(), 1)
]
IGNORED = {"codex": "tools[8]"}
"""Fields of a client that may be ignored: Codex offers a search tool of OpenAI's servers."""


@pytest.mark.parametrize(("client", "request_"), REQUESTS)
def test_a_recorded_request_is_answered_and_understood(
    scripted: ScriptedStack, client: str, request_: dict[str, Any]
) -> None:
    scripted.script = answer(says("Hello"))
    response = scripted.http.post(request_["path"], json=request_["body"])
    assert response.status_code == 200, response.text
    assert "Hello" in response.text
    assert response.headers.get("x-ignored-params", "") in ("", IGNORED.get(client, ""))
    sent = scripted.last(Generate)
    definitions = sent.options.tools.definitions if sent.options.tools is not None else ()
    names = {
        tool.get("name") or tool["function"]["name"] for tool in request_["body"].get("tools", ()) if _is_named(tool)
    }
    assert names <= {definition["function"]["name"] for definition in definitions}


def _is_named(tool: dict[str, Any]) -> bool:
    return tool.get("type", "custom") in ("function", "custom")


def test_all_clients_have_requests() -> None:
    clients = {"ai-sdk", "codex", "instructor", "langchain", "litellm", "llm", "pydantic-ai"}
    assert {file.stem for file in RECORDED.glob("*.jsonl")} == clients
