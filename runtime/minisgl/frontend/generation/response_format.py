"""Interface between the endpoint and the response formats of each API, and the JSON that all of these write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

DONE: Final = b"data: [DONE]\n\n"
"""Server-sent event that ends a complete stream."""

KEEPALIVE: Final = b": ping\n\n"
"""Server-sent comment, so that proxies keep a silent stream open."""

CONTINUED: Final = b": continued\n\n"
"""Server-sent comment: the engine of an answer was lost, and another one goes on with it."""

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's API: a token that cannot be sampled."""

_encode: Final = msgspec.json.encode
_SEPARATORS: Final = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def event_json(value: Any) -> bytes:
    """Encode a value of an event. Unicode's line separators are escaped: some HTTP clients, such as httpx with
    `iter_lines`, end a line at them, and would lose the rest of an event."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for separator, escaped in _SEPARATORS:
            data = data.replace(separator, escaped)
    return data


def finite(logprob: float | None) -> float | None:
    """Return the value, at least LOWEST; None for the first token of a prompt, which has none."""
    return None if logprob is None else max(logprob, LOWEST)


def error_event(error: ApiError) -> bytes:
    """Render the event that ends a broken stream of APIs whose events have no names."""
    return b"data: " + error.body() + b"\n\n"


class EventFormat(Protocol):
    """Server-sent events of one stream."""

    @property
    def first(self) -> bytes:
        """Events that open the response."""

    @property
    def text_event(self) -> Callable[[str], bytes] | None:
        """Renders an event of nothing but text, which is written past the handler; None if events need more."""

    @property
    def keepalive(self) -> bytes:
        """Renders what keeps a silent stream open, which clients ignore."""

    def event(self, delta: Delta) -> bytes: ...
    def last(self, ends: Sequence[Finished]) -> bytes: ...
    def error(self, error: ApiError) -> bytes:
        """Render the events of a response that cannot be completed, behind which the connection breaks."""


class ResponseFormat(Protocol):
    """Response to one request."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        """Return the body of a response that is not streamed."""

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> EventFormat:
        """Return the format of a stream. `prompt_tokens`: those of each choice's prompt."""
