"""A client of HTTP/1.1 servers, for what a gateway does: it passes on bodies in the pieces in which they arrive.

A stream has thousands of pieces, so one costs little: it goes from the callback of the socket straight to the client's
connection, without a task that wakes up for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final, cast

import httptools

from minisgl.errors import describe
from minisgl.gateway.models import Address

MAX_UNREAD_BYTES: Final = 256 << 10
"""Most bytes of a response that wait for its client; then no more are read from the server."""
_IDLE_SECONDS: Final = 60.0
"""Longest rest of a connection before it is used again. Frontends close theirs later."""
_AGE_SECONDS: Final = 300.0
"""Age from which a connection is not used again, so that new pods behind a Service get their share."""
_MAX_HEADERS: Final = 128 << 10
"""Most bytes of a response's headers."""
# A server whose machine has gone is noticed within a minute, also where it has yet to take what was sent.
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 60_000),
)


class UpstreamError(Exception):
    """The server cannot be reached, or the connection ended before the response did."""


class Exchange:
    """One request and its response. One task reads it."""

    def __init__(self, connection: _Connection, *, reused: bool) -> None:
        self._connection = connection
        self.was_reused = reused
        """The connection had served another request, so it may have been closed by the server meanwhile."""
        self.has_begun = False
        """A byte of the response has arrived."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: list[bytes] = []
        self._unread = 0
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: Callable[[bytes], bool] | None = None
        """Takes pieces in the reader's place. Set only while it waits and has read everything."""

    @property
    def is_read(self) -> bool:
        """Whether the response is complete, and the reader has all of it."""
        return self._ended and not self._pieces

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError."""
        await asyncio.shield(self._head)

    async def pieces(self, direct: Callable[[bytes], bool] | None = None) -> AsyncGenerator[bytes, None]:
        """Iterate over the body. `direct` is offered each piece that arrives while the reader waits, and returns
        whether it took it: such a piece is not returned. Raises UpstreamError where the response breaks off."""
        while True:
            if self._pieces:
                taken = b"".join(self._pieces)
                self._pieces.clear()
                self._unread = 0
                yield taken
                self._connection.resume_reading()
                continue
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._direct = direct
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = self._direct = None

    async def whole(self, limit: int) -> bytes:
        """Return the body, or a beginning of more than `limit` bytes. It can still be read with `pieces`. Raises
        UpstreamError."""
        body = b""
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > limit:
                    break
        self._pieces.insert(0, body)
        return body

    def close(self) -> None:
        """End the exchange. The connection is closed, unless the response is complete."""
        self._connection.release(self)

    # What follows is called by the connection.

    def begin_body(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers
        if not self._head.done():
            self._head.set_result(None)

    def add(self, piece: bytes) -> None:
        if self._direct is not None:
            if self._direct(piece):
                return
            self._direct = None
        self._pieces.append(piece)
        self._unread += len(piece)
        if self._unread > MAX_UNREAD_BYTES:
            self._connection.pause_reading()
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        if not self._ended:
            self._error = error
        if not self._head.done():
            self._head.set_exception(error)
            # Nobody may be waiting for it any more.
            self._head.exception()
        self._wake()

    def _wake(self) -> None:
        self._direct = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection to a server, with at most one request at a time."""

    def __init__(self, give_back: Callable[[_Connection], None], lose: Callable[[_Connection], None]) -> None:
        """`give_back` takes a connection that can be used again, `lose` one that has ended."""
        self._give_back = give_back
        self._lose = lose
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self._parts: list[bytes] = []
        self._is_informational = False
        self._is_complete = False
        self._keeps_alive = False
        self._is_paused = False
        self._made_at = self.idle_since = self._loop.time()

    def send(self, request: tuple[bytes, ...], *, reused: bool) -> Exchange:
        assert self._exchange is None and self._transport is not None, "one request at a time"
        self._exchange = Exchange(self, reused=reused)
        self._is_complete = False
        self._transport.writelines(request)
        return self._exchange

    @property
    def is_usable(self) -> bool:
        now = self._loop.time()
        assert self._transport is not None
        return not self._transport.is_closing() and now - self.idle_since < _IDLE_SECONDS

    def release(self, exchange: Exchange) -> None:
        if self._exchange is not exchange:
            return
        self._exchange = None
        is_young = self._loop.time() - self._made_at < _AGE_SECONDS
        if self._is_complete and self._keeps_alive and is_young:
            self.resume_reading()
            self.idle_since = self._loop.time()
            self._give_back(self)
        else:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # Of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop are none by inheritance.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, name, value)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or self._is_complete:
            # Nothing was asked for, so it can be no answer.
            return self.close()
        exchange.has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(UpstreamError(f"the response is not valid HTTP: {describe(error)}"))
            return self.close()
        if self._parts:
            piece = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            exchange.add(piece)
        if self._is_complete:
            exchange.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(self)
        if self._exchange is not None and not self._is_complete:
            reason = "it closed the connection" if error is None else describe(error)
            self._exchange.fail(UpstreamError(reason))

    # Of the parser.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise httptools.HttpParserError("a second response")
        self._headers = []
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADERS:
            raise httptools.HttpParserError("the headers are too long")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_informational = status < 200
        if not self._is_informational and self._exchange is not None:
            self._exchange.begin_body(status, self._headers)
        # What follows are trailers, which are dropped.
        self._headers = []

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if not self._is_informational:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()


class Client:
    """Sends requests over connections that it keeps. All methods belong to the event loop."""

    def __init__(self, connect_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_seconds = connect_seconds
        self._tls = tls
        self._idle: dict[Address, list[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def send(self, address: Address, *request: bytes, fresh: bool = False) -> Exchange:
        """Send a request, in parts. `fresh`: over a new connection. The caller must close the exchange. Raises
        UpstreamError if there is no connection; what happens later is raised by the exchange."""
        idle = [] if fresh else self._idle.get(address, [])
        while idle:
            # The last one that was used: the others grow old, and are closed.
            connection = idle.pop()
            if connection.is_usable:
                return connection.send(request, reused=True)
            connection.close()
        return (await self._connect(address)).send(request, reused=False)

    async def connect(self, address: Address) -> None:
        """Make sure that the server accepts connections, and keep one for the next request. Raises UpstreamError."""
        self._keep(address, await self._connect(address))

    async def get(self, address: Address, path: str, headers: dict[str, str], seconds: float) -> tuple[int, bytes]:
        """Return status and body of a GET request. Raises UpstreamError, also after `seconds`."""
        try:
            async with asyncio.timeout(seconds), self.reading(address, path, headers) as exchange:
                return exchange.status, b"".join([piece async for piece in exchange.pieces()])
        except TimeoutError:
            raise UpstreamError(f"no answer within {seconds:g} s") from None

    @contextlib.asynccontextmanager
    async def reading(self, address: Address, path: str, headers: dict[str, str]) -> AsyncIterator[Exchange]:
        """Send a GET request, and wait for the headers of its response. Raises UpstreamError."""
        lines = [f"GET {path} HTTP/1.1", f"host: {address.netloc}", "accept: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        exchange = await self.send(address, "\r\n".join([*lines, "", ""]).encode())
        try:
            await exchange.head()
            yield exchange
        finally:
            exchange.close()

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()

    async def _connect(self, address: Address) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                connection = await self._connect_to_any(address)
        except TimeoutError:
            raise UpstreamError(f"no connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise UpstreamError(error.strerror or describe(error)) from error
        except UnicodeError as error:
            # The resolver refuses the name, as one with a label of more than 63 characters.
            raise UpstreamError(f"the host name is not valid: {describe(error)}") from error
        self._open.add(connection)
        return connection

    async def _connect_to_any(self, address: Address) -> _Connection:
        """Connect to the first of the host's addresses that accepts. Raises the error of the last one."""
        loop = asyncio.get_running_loop()
        # Not by create_connection: when it is cancelled, uvloop leaves the lookup behind and logs how that fails.
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for number, (*_, socket_address) in enumerate(found, 1):
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(lambda one: self._keep(address, one), lambda one: self._lose(address, one)),
                    str(socket_address[0]),
                    address.port,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else address.host,
                )
            except OSError:
                if number == len(found):
                    raise
            else:
                return connection
        raise OSError(f"{address.host} has no address")

    def _keep(self, address: Address, connection: _Connection) -> None:
        self._idle.setdefault(address, []).append(connection)

    def _lose(self, address: Address, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in (idle := self._idle.get(address, [])):
            idle.remove(connection)
        if not idle:
            self._idle.pop(address, None)
