"""One HTTP connection: limits that uvicorn's protocol does not have, for clients that are slow, huge or wrong.

It bounds the headers and trailers of a request in bytes, its headers in time, and the requests that a connection may
send ahead. It answers broken HTTP with an error in the format of the API, and gives each request its
`ClientConnection`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from http import HTTPStatus
from typing import Any, Final, NoReturn

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.client_connection import ClientConnection, extension
from minisgl.frontend.server.http_parser import HttpParser
from minisgl.frontend.server.request_record import new_record
from minisgl.frontend.server.request_tracker import RequestTracker

logger = logging.getLogger(__name__)

_NEAR: Final = 0.9
"""Share of the limit from which a warning is logged."""
_FAR: Final = 0.8
"""Share of the limit below which the next warning may follow."""


class OpenFiles:
    """Limit of open files of this process. The event loop closes connections for want of descriptors without a word, so
    nothing but the warning here would show why clients cannot connect."""

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._has_warned = False

    def watch(self, descriptor: int) -> None:
        """Look at the descriptor of a new connection. The kernel gives the lowest free number, so nearly all are in use
        when it is near the limit."""
        if descriptor >= _NEAR * self._limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of at most %d files are open, most of them connections; beyond the limit new connections are "
                "closed: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=), or limit the clients",
                *(descriptor + 1, self._limit),
            )
        elif descriptor < _FAR * self._limit:
            self._has_warned = False


MAX_HEADER_BYTES: Final = 32 << 10
HEADER_SECONDS: Final = 10.0
"""From the first byte of a request to the end of its headers."""

MAX_PIPELINED: Final = 16
"""Requests of one connection that are read while earlier ones wait for their responses."""
_MAX_UNANSWERED: Final = 256
"""Requests of one connection that may wait for their responses. More than MAX_PIPELINED arrive in one piece of data."""

_CLOSE: Final = {"connection": "close"}
"""The rest of the request is not read, so the connection cannot be used again."""


class _Rejected(Exception):
    """Stops the parser; `Connection._parse_error` says why."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on everything but bodies, which their readers limit."""

    _framing_bytes = 0
    """Bytes of headers, trailers or a chunk's header that the parser has read since it last passed something on."""
    _passed_on = False
    """The data that is being parsed contains a piece of a body, or the end of a request."""
    _header_timer: asyncio.TimerHandle | None = None
    """Runs while the headers of a request are incomplete."""
    _parse_error: ApiError | None = None
    """Why a callback stopped the parser; None: the bytes are not HTTP."""
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    _client: ClientConnection | None = None
    """Of the last request."""
    url = b""
    framing = b""
    """See `http_parser.Callbacks`."""
    _is_ending = False
    """Nothing more is read: the connection ends behind the responses in progress."""
    _started_at: float | None = None
    """Arrival of the request whose bytes are being read."""

    def __init__(
        self, *args: Any, requests: RequestTracker | None = None, open_files: OpenFiles, **kwargs: Any
    ) -> None:
        """`requests`: records the requests that are rejected here; None: they are not recorded."""
        super().__init__(*args, **kwargs)
        self.parser: HttpParser = HttpParser(self)  # type: ignore[assignment]
        self._requests = requests
        self._open_files = open_files

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_files.watch(transport.get_extra_info("socket").fileno())
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
        if self._is_ending or (self._client is not None and self._client.body_error is not None):
            return
        self._passed_on = False
        super().data_received(data)
        # A header is handed over when it is complete, so one without end must be counted here. Where it begins behind
        # something else, that is not known, and it counts from the next data on.
        self._framing_bytes = 0 if self._passed_on else self._framing_bytes + len(data)
        if self._framing_bytes > MAX_HEADER_BYTES:
            self._reject(_too_large("trailers" if self._header_timer is None else "headers"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._started_at = self.loop.time()
        self._framing_bytes = 0
        self.framing = b""
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_headers)

    def on_headers_complete(self) -> None:
        self._end_headers()
        size, hosts = len(self.url), 0
        for name, value in self.headers:
            hosts += name == b"host"
            size += len(name) + len(value) + 4
            if name in (b"content-length", b"transfer-encoding"):
                self.framing = b"%s: %s" % (name, value)
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                message = "the only known Transfer-Encoding is chunked; send the body as it is"
                self._stop_parser(ApiError(501, "unsupported_transfer_encoding", message, headers=_CLOSE))
        if size > MAX_HEADER_BYTES:
            self._stop_parser(_too_large("headers"))
        if hosts > 1:
            # What stands in front of us may have decided by the other one (RFC 9112, section 3.2).
            self._stop_parser(_invalid_http("the request has several headers Host; send one"))
        if len(self._unanswered) >= _MAX_UNANSWERED:
            self._stop_parser(_invalid_http("too many requests of this connection wait; send fewer ahead"))
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            # The task of the request has not run yet.
            self._client = ClientConnection(self.cycle, self._wait_flushed)
            self.scope["extensions"] = extension(self._client)
            self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)
            if 1 < len(self._unanswered) <= MAX_PIPELINED:
                # The base class stops reading now, and without reading a disconnect goes unnoticed.
                self.flow.resume_reading()
        # The scope keeps the list of the headers. Trailers are read and dropped: as headers they would be believed.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._passed_on = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._passed_on = True

    def on_message_complete(self) -> None:
        if self.parser.is_upgrading:
            return
        self._passed_on = True
        if sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._stop_parser(_too_large("trailers"))
        super().on_message_complete()

    def _stop_parser(self, error: ApiError) -> NoReturn:
        self._parse_error = error
        raise _Rejected

    def send_400_response(self, msg: str) -> None:
        """Reject what the parser stopped at: the bytes are not HTTP, or a callback of ours raised an exception."""
        error = self._parse_error or _invalid_http("the request is not valid HTTP/1.1")
        in_progress = self.cycle is not None and not self.cycle.response_complete
        if in_progress and not self._is_reading_body() and (self._parse_error is None or error.status == 501):
            # The requests before it are valid: many clients send more than their content-length says. They get their
            # responses, with the word that the connection ends.
            self._end_headers()
            self._is_ending = True
            self.cycle.keep_alive = False
            self._record(error)
        else:
            self._reject(error)

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
        if self._client is not None and self._is_reading_body():
            # Its handler responds, and learns of it from the body that it waits for.
            self._client.body_error = error
            self.cycle.keep_alive = False
            self.cycle.message_event.set()
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

    def _is_reading_body(self) -> bool:
        """True while the only request without a response has not arrived as a whole."""
        cycle = self.cycle
        alone = all(one is cycle or one.response_complete for one in self._unanswered)
        return alone and cycle.scope is self.scope and cycle.more_body and not cycle.response_started

    def _record(self, error: ApiError) -> str:
        """Count and log a request that no handler sees. Returns the request id for the response."""
        now = self.loop.time()
        method = self.parser.get_method().decode() if self.url else ""
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        headers = Headers(raw=self.headers or [])
        record = new_record(method, path, headers, now if self._started_at is None else self._started_at)
        record.status = error.status
        record.error_code, record.error_status = error.code, error.status
        if self._requests is not None:
            self._requests.end(record, now)
        return record.request_id


def _too_large(what: str) -> ApiError:
    message = f"the {what} exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones"
    return ApiError(431, "headers_too_large", message, headers=_CLOSE)


def _invalid_http(message: str) -> ApiError:
    return ApiError(400, "invalid_http", message, headers=_CLOSE)
