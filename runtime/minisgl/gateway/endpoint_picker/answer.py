"""The response to a request as it passes through the picker: what is read of it, and what the client does not get."""

from __future__ import annotations

from typing import Any

from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.usage_report import RESPONSE_HEADER, Usage
from minisgl.gateway.endpoint_picker import messages
from minisgl.gateway.usage import UsageFilter, estimated_usage, events_in, read_usage


class Answer:
    """One response."""

    def __init__(self, record: RequestRecord, mode: int) -> None:
        """`mode`: how its body is sent."""
        self._record = record
        self._mode = mode
        self._early_usage = Usage(0, 0)
        self._filter: UsageFilter | None = None
        self._events = 0

    @property
    def usage(self) -> Usage:
        """Tokens that the request used so far, estimated where the frontend has not reported them."""
        if self._filter is None:
            return self._early_usage
        return self._filter.usage or Usage(self._early_usage.prompt_tokens, self._events)

    @property
    def is_cut_off(self) -> bool:
        """Whether the client has got the begin of the response, and not its end."""
        return bool(self._record.status and not self._record.response_complete and self._mode != messages.NONE)

    def begin(self, request_bytes: int) -> None:
        """The request is on its way: a client that leaves now has made a frontend read its prompt. `request_bytes`:
        size of its body."""
        self._early_usage = estimated_usage(request_bytes)

    def headers(self, given: Any, own: dict[str, str]) -> Any:
        """Return the message that answers the response's headers. `own`: headers for the client."""
        headers = dict(messages.headers_of(given))
        status = headers.get(b":status", b"")
        self._record.status = int(status) if status.isdigit() and len(status) == 3 else 0
        self._early_usage = read_usage(headers.get(RESPONSE_HEADER.encode(), b"")) or Usage(0, 0)
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._filter = UsageFilter()
        if given.end_of_stream:
            self._end()
        return messages.response_headers(own, [RESPONSE_HEADER])

    def piece(self, given: Any) -> Any:
        """Return the message that answers a piece of the response's body."""
        passed: bytes = given.body
        if self._filter is not None:
            self._events += events_in(passed) if passed else 0
            passed = self._filter.feed(passed)
            if given.end_of_stream:
                passed += self._filter.rest()
        if given.end_of_stream:
            self._end()
        return messages.response_body(given, passed, self._mode)

    def trailers(self) -> list[Any]:
        """Return the messages that answer the trailers, which end the response."""
        rest = b"" if self._filter is None else self._filter.rest()
        self._end()
        before = [messages.rest_of_response(rest)] if rest and self._mode == messages.FULL_DUPLEX else []
        return [*before, messages.response_trailers()]

    def _end(self) -> None:
        self._record.response_complete = True
