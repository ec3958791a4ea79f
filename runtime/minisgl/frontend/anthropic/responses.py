"""JSON of the Messages API: the message, whole or in the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from minisgl.frontend.anthropic.output import Content, Event
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import event_json
from minisgl.frontend.server.error_body import anthropic_error
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

_MAX_HELD: Final = 16
"""Outputs in a row that cause no event, because a call is held, before a ping. The watchdog takes a stream for silent
only while there is no output."""

_json = msgspec.json.encode


class MessagesFormat(msgspec.Struct, frozen=True):
    """Response to POST /v1/messages."""

    max_tokens: int
    thinking_omitted: bool = False
    """Thinking is only in the signatures of its blocks."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        (choice,) = choices
        assert choice.finished is not None
        content = Content(self.thinking_omitted)
        for delta in choice.joined or choices:
            content.add(delta)
        end = self.end(choice.finished, content)
        message = _message(response_id, model, usage=_usage(choice.finished))
        return _json({**message, "content": content.blocks(), **end})

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> MessagesEvents:
        return MessagesEvents(self, _message(response_id, model, usage=_first_usage(prompt_tokens[0])))

    def end(self, finished: Finished, content: Content) -> dict[str, Any]:
        """Return the reason for the end of the message."""
        if finished.reason == "length":
            is_max = finished.completion_tokens >= self.max_tokens
            return _stop("max_tokens" if is_max else "model_context_window_exceeded")
        if isinstance(finished.matched_stop, str):
            return _stop("stop_sequence", finished.matched_stop)
        return _stop("tool_use" if content.has_tool_use else "end_turn")


def _message(response_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{response_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        **_stop(None),
        "usage": usage,
    }


def _stop(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _usage(end: Finished) -> dict[str, Any]:
    """Tokens of the prompt that are not cached, and those that are, are counted apart in this API."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.cached_tokens,
        "output_tokens": end.completion_tokens,
    }


def _first_usage(prompt_tokens: int) -> dict[str, Any]:
    """Return the usage before it is known how much of the prompt is cached."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }


class MessagesEvents:
    """Server-sent events of one stream."""

    keepalive: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, format: MessagesFormat, message: dict[str, Any]) -> None:
        self._format = format
        self._message = message
        self._content = Content(format.thinking_omitted)
        self._held = 0
        """Outputs since the last event."""

    @property
    def first(self) -> bytes:
        return _render({"type": "message_start", "message": self._message}) + self.keepalive

    def event(self, delta: Delta) -> bytes:
        events = b"".join(map(_render, self._content.add(delta)))
        self._held = 0 if events else self._held + 1
        if self._held < _MAX_HELD:
            return events
        self._held = 0
        return self.keepalive

    def text_event(self, text: str) -> bytes:
        return self.event(Delta(0, text, 0, (), None))

    def last(self, ends: Sequence[Finished]) -> bytes:
        (end,) = ends
        delta = self._format.end(end, self._content)
        events: list[Event] = [
            {"type": "message_delta", "delta": delta, "usage": _usage(end)},
            {"type": "message_stop"},
        ]
        return b"".join(map(_render, events))

    def error(self, error: ApiError) -> bytes:
        return error_event(error)


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %s\n\n" % anthropic_error(error)


def _render(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), event_json(event))
