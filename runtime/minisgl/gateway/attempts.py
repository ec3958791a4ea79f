"""The spans of a gateway's attempts to have a request answered, each the parent of a frontend's own span."""

from __future__ import annotations

import asyncio
from typing import Final

from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_spans import ERROR_TYPE
from minisgl.frontend.tracing.context import TRACEPARENT, TRACESTATE
from minisgl.frontend.tracing.request_trace import Value, new_span_id
from minisgl.gateway.models import Address

LOST: Final = "frontend_lost"
REFUSED: Final = "shutting_down"
UNREACHABLE: Final = "unreachable"
CLIENT_LEFT: Final = "client_disconnected"
"""Why attempts fail, beside the codes of errors."""
_FIRST_ERROR: Final = 400
"""Status from which on OpenTelemetry calls a client's request failed."""


class Attempts:
    """Attempts of one request. Without a trace nothing happens."""

    def __init__(self, record: RequestRecord) -> None:
        self._trace = record.trace
        self._method = record.method
        self._count = 0
        self._span_id = 0
        """Of the attempt in progress; 0: none."""
        self._started_at = 0.0
        self._status = 0
        """Of the response; 0: none has begun."""
        self._attributes: dict[str, Value] = {}

    def begin(self, address: Address) -> list[tuple[bytes, bytes]]:
        """Begin an attempt. Returns the headers by which the frontend learns of its span."""
        if self._trace is None:
            return []
        self._span_id, self._started_at = new_span_id(), asyncio.get_running_loop().time()
        self._status = 0
        self._attributes = {
            "http.request.method": self._method,
            "server.address": address.host,
            "server.port": address.port,
        }
        if self._count:
            self._attributes["http.request.resend_count"] = self._count
        self._count += 1
        headers = [(TRACEPARENT.encode(), self._trace.traceparent(self._span_id).encode())]
        if self._trace.state:
            headers.append((TRACESTATE.encode(), self._trace.state.encode()))
        return headers

    def answered(self, status: int) -> None:
        """The head of a response has arrived."""
        self._status = status

    def end(self, error: str = "") -> None:
        """End the attempt in progress, if there is one. `error`: why it failed; empty: its response is complete."""
        if self._trace is None or not self._span_id:
            return
        if self._status:
            self._attributes["http.response.status_code"] = self._status
        if self._status >= _FIRST_ERROR:
            error = error or str(self._status)
        if error:
            self._attributes[ERROR_TYPE] = error
        now = asyncio.get_running_loop().time()
        self._trace.add(
            self._method,
            self._started_at,
            now,
            self._attributes,
            kind="client",
            span_id=self._span_id,
            has_failed=bool(error),
        )
        self._span_id = 0

    def add_held(self, since: float) -> None:
        """Add the time for which the request waited for a frontend, which ends now."""
        if self._trace is not None:
            self._trace.add("held", since, asyncio.get_running_loop().time())
