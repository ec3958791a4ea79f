"""A small HTTP/1.1 client for streamed answers: one connection per request, with the arrival time of each chunk.

General clients spend more time per chunk than the server does, so that a benchmark would measure the client.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from minisgl.errors import CodedError

_CONNECT_SECONDS: Final = 10
_ERROR_BYTES: Final = 300
"""Bytes of an error's body that are shown, if it is not an error of OpenAI's format."""


class HttpError(CodedError):
    """A request failed. `code` is stable; `status` is the HTTP status, or 0 without an answer."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(code, message)
        self.status = status


class Event(NamedTuple):
    """One server-sent event."""

    at: float
    """time.perf_counter() at the arrival of its last byte."""
    data: bytes


class Endpoint:
    """Address of an OpenAI API; `url` with or without its /v1. Raises HttpError `bad_url`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise HttpError("bad_url", f"the port in {url!r} is invalid: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError("bad_url", f"{url!r} is not the URL of an endpoint; use a form like http://127.0.0.1:8000")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._authorization = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._host_header = parts.netloc.rpartition("@")[2]

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None
    ) -> AsyncIterator[Response]:
        """Send a request with a JSON `body`, encoded or not, and wait for the headers of the answer. The end of the
        block closes the connection. Raises HttpError."""
        content = encoded(body) if isinstance(body, Mapping) else body or b""
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host_header}\r\nConnection: close\r\n"
            f"{self._authorization}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, response = await loop.create_connection(Response, self.host, self.port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {_CONNECT_SECONDS} s"
            raise HttpError("cannot_connect", f"cannot connect to {self.url}: {reason}") from error
        try:
            response.sent_at = time.perf_counter()
            transport.write(head.encode() + content)
            await response.started()
            yield response
        finally:
            transport.abort()

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request; returns the JSON value of its answer. Raises HttpError, also for a status of 400 or more."""
        async with self.request(method, path, body) as response:
            content = await response.read()
            response.raise_for_status(content)
            try:
                return json.loads(content)
            except ValueError as error:
                raise HttpError(
                    "not_json", f"{self.url}{path} does not return JSON; is it an OpenAI endpoint?"
                ) from error

    async def first_model(self) -> str:
        """Name of the first model in the endpoint's list. Raises HttpError."""
        listed = await self.json("GET", "/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise HttpError("no_model", f"{self.url} lists no model; name one with --model") from error

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Event]]:
        """Send a request; returns the events of its streamed answer. Raises HttpError, also for an error status or an
        incomplete stream."""
        async with self.request("POST", path, body) as response:
            if response.status >= 400:
                response.raise_for_status(await response.read())
            yield response.events()


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON text of a body."""
    # Input from a terminal can contain bytes that are not text; each becomes a question mark.
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


class Events:
    """Splits a body into server-sent events, without comments and without the last one, [DONE]."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        """Whether [DONE] has arrived; what follows it is ignored."""

    def feed(self, at: float, chunk: bytes) -> Iterator[Event]:
        """Events that end in `chunk`, which arrived at the time `at`."""
        *blocks, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
            self.done = self.done or data == b"[DONE]"
            if data and not self.done:
                yield Event(at, data)

    def check_done(self) -> None:
        """Raise HttpError `truncated` if [DONE] is missing."""
        if not self.done:
            raise HttpError("truncated", "the stream ended without [DONE]")


def events_of(chunks: Iterable[tuple[float, bytes]]) -> Iterator[Event]:
    """Events of a body in `chunks` with their arrival times. Raises HttpError `truncated`."""
    events = Events()
    for at, chunk in chunks:
        yield from events.feed(at, chunk)
    events.check_done()


class Response(asyncio.Protocol):
    """Answer to one request, while it arrives. Created by `Endpoint.request`."""

    sent_at = 0.0
    """time.perf_counter() when the request was written."""

    def __init__(self) -> None:
        # Part of the frontend extra, which other commands do not need.
        import httptools

        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser_error = httptools.HttpParserError
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._headers_complete = self._complete = self._lost = False

    async def started(self) -> None:
        """Wait for the headers."""
        while not self._headers_complete:
            await self._more()

    async def chunks(self) -> AsyncIterator[tuple[float, bytes]]:
        """Chunks of the body with their arrival times."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._complete:
                return
            await self._more()

    async def read(self) -> bytes:
        """Wait for the whole body."""
        return b"".join([chunk async for _, chunk in self.chunks()])

    async def events(self) -> AsyncIterator[Event]:
        """Events before [DONE]. Raises HttpError `truncated` if [DONE] is missing."""
        events = Events()
        async for at, chunk in self.chunks():
            for event in events.feed(at, chunk):
                yield event
            if events.done:
                return
        events.check_done()

    async def all_chunks(self) -> list[tuple[float, bytes]]:
        """Wait for the whole body; returns its chunks with their arrival times. Wakes up only once."""
        await self._ended.wait()
        if not self._complete:
            raise self._lost_error()
        return list(self._chunks)

    def raise_for_status(self, content: bytes) -> None:
        """Raise HttpError for a status of 400 or more, with the message of the body `content`."""
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
        if self._lost and not self._chunks and not self._complete:
            raise self._lost_error()
        await self._wake.wait()
        self._wake.clear()

    def _lost_error(self) -> HttpError:
        return HttpError("connection_lost", "the connection broke before the answer was complete", self.status)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._parser_error:
            self.connection_lost(None)
        self._wake.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._lost = True
        self._wake.set()
        self._ended.set()

    # Callbacks of the parser.
    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headers_complete = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._complete = True
        self._ended.set()
