"""The events of any message have the order of the API, and together are the message."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.anthropic.responses import MessagesFormat
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import ToolCallDelta
from support.frontend.random_output import outputs, whole

PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def replay(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the message from its events as a client does, and check each of them."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping["type"], delta["type"], stop["type"]) == (
        *("message_start", "ping", "message_delta"),
        "message_stop",
    )
    message: dict[str, Any] = start["message"]
    assert message["content"] == []
    arguments: dict[int, str] = {}
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open = True
            message["content"].append(event["content_block"])
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = _input(arguments.get(event["index"], ""))
            continue
        assert event["type"] == "content_block_delta"
        kind = event["delta"]["type"]
        if kind == "input_json_delta":
            arguments[event["index"]] = arguments.get(event["index"], "") + event["delta"]["partial_json"]
        else:
            assert event["delta"][PIECES[kind]]
            block[PIECES[kind]] += event["delta"][PIECES[kind]]
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


@given(outputs(("f", "g")), st.booleans())
def test_the_events_of_any_message_are_the_whole_message(deltas: list[Delta], omitted: bool) -> None:
    format = MessagesFormat(max_tokens=9, thinking_omitted=omitted)
    events = format.events("1", "m", [3])
    end = deltas[-1].finished
    assert end is not None
    data = events.first + b"".join(map(events.event, deltas)) + events.last([end])
    parsed = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\ndata: ")
        parsed.append(json.loads(body))
        assert name == f"event: {parsed[-1]['type']}"
    full = json.loads(format.full("1", "m", [whole(deltas)]))
    assert replay(parsed) == full
    texts = [block["text"] for block in full["content"] if block["type"] == "text"]
    assert "".join(texts) == "".join(delta.text for delta in deltas)
    uses = [block for block in full["content"] if block["type"] == "tool_use"]
    ended_itself = end.reason == "stop" and end.matched_stop is None
    assert (full["stop_reason"] == "tool_use") == (ended_itself and bool(uses))


def test_a_stream_is_kept_open_while_a_long_call_is_held() -> None:
    events = MessagesFormat(max_tokens=9).events("1", "m", [3])
    pieces = ["", '{"a": "', *["x"] * 40, '"}']
    sent = [events.event(Delta(0, "", 1, (), None, tool_calls=(piece,))) for piece in _call(pieces)]
    assert set(sent) == {b"", events.keepalive} and sent.count(events.keepalive) == 2


def _call(pieces: list[str]) -> list[ToolCallDelta]:
    return [ToolCallDelta(0, "" if number else "1", "" if number else "f", text) for number, text in enumerate(pieces)]
