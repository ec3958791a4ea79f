"""JSON of the Responses API: the response object, whole or in the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import KEEPALIVE, event_json
from minisgl.frontend.responses.output import Output, OutputOptions
from minisgl.frontend.responses.output_items import Event
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

_json = msgspec.json.encode


class ResponsesFormat(msgspec.Struct, frozen=True):
    """Response to POST /v1/responses."""

    request: dict[str, Any]
    """Fields of the request that the response repeats."""
    options: OutputOptions

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        (choice,) = choices
        assert choice.finished is not None
        response = _Response(self, response_id, model)
        for delta in choice.joined or choices:
            response.output.add(delta)
        return _json(response.ended(choice.finished))

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> ResponsesEvents:
        return ResponsesEvents(self, response_id, model)


class _Response:
    """The response object, from its creation to its end."""

    def __init__(self, format: ResponsesFormat, response_id: str, model: str) -> None:
        self.output = Output(format.options, response_id)
        self._fields = {
            "id": f"resp_{response_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **format.request,
        }

    def in_progress(self) -> dict[str, Any]:
        return self._object("in_progress")

    def ended(self, finished: Finished) -> dict[str, Any]:
        usage = _usage(finished)
        if finished.reason == "length":
            return self._object("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._object("completed", usage=usage, completed_at=int(time.time()))

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self._object("failed", error={"code": error.code, "message": error.message})

    def _object(self, status: str, **fields: Any) -> dict[str, Any]:
        unset = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None}
        return {**self._fields, "status": status, **unset, **fields, "output": self.output.items()}


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def early_error(error: ApiError) -> bytes:
    """Return the only event of a stream that ends before its response was created."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    data = event_json({"type": "error", "sequence_number": 0, **fields, "error": {"type": error.kind, **fields}})
    return b"event: error\ndata: %s\n\n" % data


class ResponsesEvents:
    """Server-sent events of one stream, numbered in their order."""

    keepalive = KEEPALIVE

    def __init__(self, format: ResponsesFormat, response_id: str, model: str) -> None:
        self.text_event: Callable[[str], bytes] | None = None if format.options.scored else self._text_event
        self._response = _Response(format, response_id, model)
        self._count = 0

    @property
    def first(self) -> bytes:
        response = self._response.in_progress()
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._render({"type": kind, "response": response}) for kind in kinds)

    def event(self, delta: Delta) -> bytes:
        return b"".join(map(self._render, self._response.output.add(delta)))

    def last(self, ends: Sequence[Finished]) -> bytes:
        (end,) = ends
        response = self._response.ended(end)
        return self._render({"type": f"response.{response['status']}", "response": response})

    def error(self, error: ApiError) -> bytes:
        """The error event has its fields twice: clients read them where OpenAI documents or where it sends them."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        failed: Event = {"type": "response.failed", "response": self._response.failed(error)}
        return self._render({"type": "error", **fields, "error": {"type": error.kind, **fields}}) + self._render(failed)

    def _text_event(self, text: str) -> bytes:
        return self.event(Delta(0, text, 0, (), None))

    def _render(self, event: Event) -> bytes:
        number = self._count
        self._count += 1
        data = event_json({"type": event["type"], "sequence_number": number, **event})
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)
