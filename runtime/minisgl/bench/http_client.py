"""A small HTTP/1.1 client for answers that come in pieces: one connection a request, the time of each piece kept.

General clients spend more on a piece than the server does, and then a benchmark measures the client.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from minisgl.errors import CodedError

_CONNECT_SECONDS: Final = 10
_ERROR_BYTES: Final = 300
"""Of an error's body, when it is not what OpenAI's look like."""


class HttpError(CodedError):
    """A request failed. `code` is stable, `status` the HTTP status or 0 when there was none."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(code, message)
        self.status = status


class Event(NamedTuple):
    """One server-sent event."""

    at: float
    """time.perf_counter() at the arrival of its last byte."""
    data: bytes


class Endpoint:
    """Where an OpenAI API is; `url` with or without its /v1. Raises HttpError for a URL that cannot be one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise HttpError("bad_url", f"{url!r} has no valid port: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError("bad_url", f"{url!r} is no address of an endpoint, like http://127.0.0.1:8000")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._authorization = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._host_header = parts.netloc.rpartition("@")[2]

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[Response]:
        """Send it; the answer once its headers are there. Leaving the block closes the connection. Raises HttpError."""
        # What a terminal gives need not be text: a byte that is none becomes a question mark.
        content = b"" if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host_header}\r\nConnection: close\r\n"
            f"{self._authorization}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, response = await loop.create_connection(Response, self.host, self.port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_CONNECT_SECONDS} s"
            raise HttpError("cannot_connect", f"cannot connect to {self.url}: {reason}") from error
        try:
            transport.write(head.encode() + content)
            await response.started()
            yield response
        finally:
            transport.abort()

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A whole answer in JSON. Raises HttpError, also for a status of 400 or more."""
        async with self.request(method, path, body) as response:
            content = await response.read()
            response.raise_for_status(content)
            try:
                return json.loads(content)
            except ValueError as error:
                raise HttpError("not_json", f"{self.url}{path} gives no JSON: is it an OpenAI endpoint?") from error

    async def first_model(self) -> str:
        """The first model that it lists. Raises HttpError."""
        listed = await self.json("GET", "/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise HttpError("no_model", f"{self.url} lists no model: name one with --model") from error

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Event]]:
        """The events of a streamed answer. Raises HttpError: no success, or broken off before its end."""
        async with self.request("POST", path, body) as response:
            if response.status >= 400:
                response.raise_for_status(await response.read())
            yield response.events()


class Response(asyncio.Protocol):
    """An answer on its way in. `Endpoint.request` makes it."""

    def __init__(self) -> None:
        # Part of the frontend extra, which other commands do without.
        import httptools

        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser_error = httptools.HttpParserError
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._wake = asyncio.Event()
        self._headers_complete = self._complete = self._lost = False

    async def started(self) -> None:
        while not self._headers_complete:
            await self._more()

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """(arrival, bytes) of the body."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._complete:
                return
            await self._more()

    async def read(self) -> bytes:
        return b"".join([piece async for _, piece in self.pieces()])

    async def events(self) -> AsyncIterator[Event]:
        """The data of each event up to [DONE], which must come. Comments are left out."""
        rest = b""
        async for at, piece in self.pieces():
            *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
                if data == b"[DONE]":
                    return
                if data:
                    yield Event(at, data)
        raise HttpError("truncated", "the stream ended without [DONE]", self.status)

    def raise_for_status(self, content: bytes) -> None:
        if self.status < 400:
            return
        message = content[:_ERROR_BYTES].decode(errors="replace")
        try:
            error = json.loads(content)["error"]
            message = f"{error['message']} ({error.get('code')})"
        except (ValueError, KeyError, TypeError):
            pass
        raise HttpError("http_error", f"HTTP {self.status}: {message}", self.status)

    async def _more(self) -> None:
        if self._lost and not self._pieces and not self._complete:
            raise HttpError("connection_lost", "the connection broke before the answer was complete", self.status)
        await self._wake.wait()
        self._wake.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._parser_error:
            self._lost = True
        self._wake.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._lost = True
        self._wake.set()

    # What the parser calls.
    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headers_complete = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._complete = True
