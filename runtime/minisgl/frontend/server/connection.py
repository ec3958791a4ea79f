"""One HTTP connection: limits that uvicorn's protocol does not have, for clients that are slow, huge or wrong.

It bounds the headers of a request in bytes and time, answers broken HTTP with an error in the format of the API, and
gives each request its `ClientConnection`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.client_connection import ClientConnection, extension
from minisgl.frontend.server.request_record import new_record
from minisgl.frontend.server.request_tracker import RequestTracker

MAX_HEADER_BYTES: Final = 32 << 10
HEADER_SECONDS: Final = 10.0
"""From the first byte of a request to the end of its headers."""

MAX_PIPELINED: Final = 16
"""Requests of one connection that are read while earlier ones wait for their responses."""

_HEADERS_TOO_LARGE: Final = ApiError(
    431, "headers_too_large", f"the headers exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones"
)


class _HeadersTooLarge(Exception):
    """Stops the parser."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on headers."""

    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None
    """Runs while the headers of a request are incomplete."""
    _parse_error = ApiError(400, "invalid_http", "the request is not valid HTTP/1.1")
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    url = b""
    _started_at: float | None = None
    """Arrival of the request whose bytes are being read."""

    def __init__(self, *args: Any, requests: RequestTracker | None = None, **kwargs: Any) -> None:
        """`requests`: records the requests that are rejected here; None: they are not recorded."""
        super().__init__(*args, **kwargs)
        self._requests = requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A connection that never sends a request is as idle as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # The base class tells the last of several requests only.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_timer is not None:
            # A header is handed over when it is complete, so one without end must be counted here.
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._reject(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._started_at = self.loop.time()
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_headers)

    def on_headers_complete(self) -> None:
        self._end_headers()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._parse_error = _HEADERS_TOO_LARGE
            raise _HeadersTooLarge
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            # The task of the request has not run yet.
            self.scope["extensions"] = extension(ClientConnection(self.cycle, self._wait_flushed))
            self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)
            if 1 < len(self._unanswered) <= MAX_PIPELINED:
                # The base class stops reading now, and without reading a disconnect goes unnoticed.
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Reject what the parser stopped at: the bytes are not HTTP, or a callback of ours raised an exception."""
        self._reject(self._parse_error)

    async def _wait_flushed(self) -> None:
        is_lost = self not in self.connections
        if is_lost or not self.transport.get_write_buffer_size():
            return
        # The base class would write the last part and be done, and close() never completes if the peer stops reading.
        self.transport.set_write_buffer_limits(0)
        await self.flow.drain()
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits()

    def _on_slow_headers(self) -> None:
        self._reject(ApiError(408, "head_timeout", f"the headers did not arrive within {HEADER_SECONDS:g} s"))

    def _end_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _reject(self, error: ApiError) -> None:
        self._end_headers()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            lines = [
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                f"x-request-id: {self._record(error)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        # Otherwise a response is in progress, and nothing may be written into it.
        self.transport.close()
        # close() never completes if the peer stops reading.
        self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _record(self, error: ApiError) -> str:
        """Count and log a request that no handler sees. Returns the request id for the response."""
        now = self.loop.time()
        method = self.parser.get_method().decode() if self.url else ""
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        headers = Headers(raw=self.headers or [])
        record = new_record(method, path, headers, now if self._started_at is None else self._started_at)
        record.status = error.status
        record.error_code = error.code
        if self._requests is not None:
            self._requests.end(record, now)
        return record.request_id
