"""A session of Claude Code: requests with its headers and fields, of which most have no meaning for this server."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from minisgl.wire.text import ChatMessage, Encode, Generate
from support.frontend.scripted import ScriptedStack, answer, calls, says, thinks

BETAS = [
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "fine-grained-tool-streaming-2025-05-14",
    "context-management-2025-06-27",
    "prompt-caching-scope-2026-01-05",
    "advanced-tool-use-2025-11-20",
    "effort-2025-11-24",
]
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA: Any = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "Write", "description": "Write a file.", "input_schema": SCHEMA, "eager_input_streaming": True},
    {"name": "ToolSearch", "description": "Find tools.", "input_schema": {"type": "object", "properties": {}}},
    {"name": "mcp__docs__find", "description": "Find.", "input_schema": SCHEMA, "defer_loading": True, **CACHED},
]
REQUEST: Any = {
    "model": "default",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.69; cch=1;"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "The directory is /work.", "cache_control": {"type": "ephemeral", "scope": "global"}},
    ],
    "tools": TOOLS,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
FIRST: Any = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {"type": "text", "text": "Write a file.", **CACHED},
    ],
}
THINKING_OFF: Any = {"type": "disabled"}


@pytest.fixture
def client(scripted: ScriptedStack) -> anthropic.Anthropic:
    headers = {"x-app": "cli", "user-agent": "claude-cli/2.1.69 (external, cli)"}
    return anthropic.Anthropic(
        base_url=scripted.url, auth_token="none", api_key=None, max_retries=0, default_headers=headers
    )


def test_a_session_of_a_coding_agent(scripted: ScriptedStack, client: anthropic.Anthropic) -> None:
    # Whether the key is valid, and a title for the session.
    scripted.script = answer(says("ok"))
    probe: Any = {"role": "user", "content": "quota"}
    assert client.beta.messages.create(model="default", max_tokens=1, messages=[probe], betas=BETAS).content
    title: Any = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    scripted.script = answer(says('{"title": "A file"}'))
    titled = client.beta.messages.create(
        model="default",
        max_tokens=64,
        messages=[FIRST],
        thinking=THINKING_OFF,
        output_config={"format": {"type": "json_schema", "schema": title}},
        betas=BETAS,
    )
    assert titled.content[0].type == "text"
    assert scripted.last(Generate).options.structured_output is not None

    # A call whose arguments arrive piece by piece.
    pieces = ['{"path": "a', '.py", "cont', 'ent": "x = 1\\n"}']
    scripted.script = answer(thinks("A file."), says("I write it."), calls(0, "Write", *pieces))
    with client.beta.messages.stream(**REQUEST, messages=[FIRST], betas=BETAS) as stream:
        events = list(stream)
        message = stream.get_final_message()
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    arrived = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert [piece for piece in arrived if piece] == pieces
    assert message.stop_reason == "tool_use"
    assert message.content[-1].type == "tool_use" and message.content[-1].input == {
        "path": "a.py",
        "content": "x = 1\n",
    }
    sent = scripted.last(Generate)
    assert sent.messages == (
        ChatMessage("system", "You are a coding agent.\n\nThe directory is /work."),
        ChatMessage("user", "<system-reminder>Be brief.</system-reminder>\nWrite a file."),
    )
    assert sent.options.tools is not None
    assert [definition["function"]["name"] for definition in sent.options.tools.definitions] == [
        "Write",
        "ToolSearch",
        "mcp__docs__find",
    ]

    # The results: of the call, and of a search for tools.
    turn: Any = [block.to_dict() for block in message.content]
    turn.append({"type": "tool_use", "id": "t2", "name": "ToolSearch", "input": {}, "caller": {"type": "direct"}})
    results: Any = [
        {
            "type": "tool_result",
            "tool_use_id": "call_0",
            "content": [{"type": "text", "text": "done"}, {"type": "text", "text": "<system-reminder/>", **CACHED}],
        },
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "content": [{"type": "tool_reference", "tool_name": "mcp__docs__find"}],
        },
        {"type": "text", "text": "Go on.", **CACHED},
    ]
    conversation = [FIRST, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    scripted.script = answer(says("Done."))
    with client.beta.messages.stream(**REQUEST, messages=conversation, betas=BETAS) as stream:
        assert stream.get_final_message().content[-1].to_dict()["text"] == "Done."
    history = scripted.last(Generate).messages
    assert history is not None
    assert (history[2].reasoning, history[2].content) == ("A file.", "I write it.")
    assert [call["function"]["name"] for call in history[2].tool_calls or ()] == ["Write", "ToolSearch"]
    assert history[3:] == (
        ChatMessage("tool", "done\n<system-reminder/>", tool_call_id="call_0"),
        ChatMessage("tool", "The tool mcp__docs__find is available.", tool_call_id="t2"),
        ChatMessage("user", "Go on."),
    )

    # What the context holds, with the fields of the request.
    counted = {name: REQUEST[name] for name in ("model", "system", "tools", "thinking", "context_management")}
    assert client.beta.messages.count_tokens(**counted, messages=conversation, betas=BETAS).input_tokens
    assert scripted.last(Encode).messages == history
