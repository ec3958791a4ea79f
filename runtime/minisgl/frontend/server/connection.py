"""One HTTP connection: what the server's own protocol leaves open to clients that are slow, huge or wrong.

It bounds the head of a request in bytes and time, answers broken HTTP in the one shape of errors, and lets whoever
serves a request drop its connection without waiting for a client that does not read.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.direct_writes import WRITE, DirectWrites
from minisgl.frontend.server.traffic import Traffic, new_record

MAX_HEAD_BYTES: Final = 32 << 10
HEAD_SECONDS: Final = 10.0
"""From the first byte of a request to the end of its headers."""

MAX_PIPELINED: Final = 16
"""Requests of one connection that are read while earlier ones wait for their answers."""

DROP: Final = "minisgl.drop"
"""The ASGI extension: a function that closes the connection at once, with what waits to be sent."""

READ_OUT: Final = "minisgl.read_out"
"""The ASGI extension: waits until the client has taken all that was written, or is gone."""


_HEAD_TOO_LARGE: Final = ApiError(
    431, "headers_too_large", f"the headers are longer than {MAX_HEAD_BYTES} bytes: send fewer or shorter ones"
)


class _HeadTooLarge(Exception):
    """Ends the parser's work on a request."""


class Connection(HttpToolsProtocol):
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    """Runs while the head of a request is incomplete."""
    _problem = ApiError(400, "invalid_http", "the request is not valid HTTP/1.1")
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    url = b""
    _began: float | None = None
    """When the request came whose bytes are being read."""

    def __init__(self, *args: Any, traffic: Traffic | None = None, **kwargs: Any) -> None:
        """`traffic`: where requests are known that are refused here; None: they are known nowhere."""
        super().__init__(*args, **kwargs)
        self._traffic = traffic

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A connection that never asks for anything is as idle as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # The base class tells the last of several requests only.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            # A header is handed over when it is complete, so one without end must be counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = self.loop.time()
        self.scope["extensions"] = {DROP: {"drop": self.transport.abort}, READ_OUT: {"read_out": self._read_out}}
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def on_headers_complete(self) -> None:
        self._end_head()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._problem = _HEAD_TOO_LARGE
            raise _HeadTooLarge
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"][WRITE] = {"write": DirectWrites(self.cycle).write}
            self._unanswered = (*(one for one in self._unanswered if not one.response_complete), self.cycle)
            if 1 < len(self._unanswered) <= MAX_PIPELINED:
                # The base class stops reading now, and who does not read does not see that the client leaves.
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """The parser has stopped: the bytes are no HTTP, or a callback of ours did not want more."""
        self._refuse(self._problem)

    async def _read_out(self) -> None:
        is_lost = self not in self.connections
        if is_lost or not self.transport.get_write_buffer_size():
            return
        # The base class would write the last part and be done, and a close waits without end for who reads nothing.
        self.transport.set_write_buffer_limits(0)
        await self.flow.drain()
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits()

    def _on_slow_head(self) -> None:
        self._refuse(ApiError(408, "head_timeout", f"the headers did not arrive within {HEAD_SECONDS:g} s"))

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            lines = [
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                f"x-request-id: {self._note(error)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        # Otherwise an answer is under way, and nothing may be written into it.
        self.transport.close()
        # A close waits without end for who reads nothing.
        self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _note(self, error: ApiError) -> str:
        """Count and log what no handler will ever see. Returns the id that the answer carries."""
        now = self.loop.time()
        method = self.parser.get_method().decode() if self.url else ""
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        headers = Headers(raw=self.headers or [])
        record = new_record(method, path, headers, now if self._began is None else self._began)
        record.status = error.status
        record.error_code = error.code
        if self._traffic is not None:
            self._traffic.end(record, now)
        return record.request_id
