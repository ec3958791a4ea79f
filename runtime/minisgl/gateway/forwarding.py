"""One request on its way to a frontend, and the response on its way back.

The request is sent again where nothing of a response has arrived: to another frontend, or after a wait for one. Once a
byte has arrived it is never sent again: the client may have read a part of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.types import Receive, Send

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.generation.stream_opening import StreamOpening
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.usage_report import RESPONSE_HEADER, Usage
from minisgl.gateway.attempts import CLIENT_LEFT, LOST, REFUSED, UNREACHABLE, Attempts
from minisgl.gateway.early_errors import counted_code, early_error, error_in
from minisgl.gateway.headers import passed_response_headers, request_head
from minisgl.gateway.holding import Holding
from minisgl.gateway.models import Address, Model
from minisgl.gateway.paths import STREAM_PATHS
from minisgl.gateway.upstream import Client, Exchange, UpstreamError
from minisgl.gateway.usage import UsageFilter, estimated_usage, events_in, read_usage

logger = logging.getLogger(__name__)

_MAX_LOSSES: Final = 3
"""Frontends that may be lost with a request before it ends in an error: it may be what they die of."""
_HEADER_SECONDS: Final = 15.0
"""Time after which a stream that waits gets its headers, so that proxies do not take it for dead."""
_PING_SECONDS: Final = 15.0
_MAX_ERROR_BYTES: Final = 64 << 10
"""Bytes from which a body is no error of a frontend."""
_EVENT_STREAM: Final = b"text/event-stream"
_USAGE_HEADER: Final = RESPONSE_HEADER.encode()


class Outgoing:
    """A request as it is sent to a frontend."""

    def __init__(
        self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> None:
        self._method = method
        self.path = path
        self._query = query
        self._headers = headers
        self.body = body

    def parts(self, address: Address, more_headers: list[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
        """`more_headers`: those of this attempt alone."""
        headers = self._headers + more_headers
        head = request_head(self._method, self.path, self._query, address.netloc, headers, len(self.body))
        return (head, self.body) if self.body else (head,)


class Forwarding:
    """One request and its response."""

    def __init__(
        self,
        client: Client,
        holding: Holding,
        record: RequestRecord,
        model: Model,
        turn: int,
        outgoing: Outgoing,
        own_headers: Callable[[], dict[str, str]],
    ) -> None:
        """`turn`: number of the address that is tried first. `own_headers` returns the gateway's headers of the
        response, when its first byte is sent."""
        self._client = client
        self._holding = holding
        self._record = record
        self._model = model
        self._turn = turn
        self._outgoing = outgoing
        self._own_headers = own_headers
        self._attempts = Attempts(record)
        self._losses = 0
        """Connections that ended after the request was sent, before a byte of the response, and refusals by frontends
        that shut down."""
        self._filter: UsageFilter | None = None
        self._early_usage = Usage(0, 0)
        self._has_begun = False
        """The client has got a part of the frontend's response."""
        self._events = 0
        """Events of the body that the client got, at least one for each piece."""

    @property
    def usage(self) -> Usage:
        """Tokens that the request used so far. Of a stream that broke off, the frontend reported those of the prompt
        alone; each event had a token at least. Where no response has begun, those of the prompt are estimated."""
        if self._filter is None:
            return self._early_usage
        return self._filter.usage or Usage(self._early_usage.prompt_tokens, self._events)

    async def answer(self, send: Send, *, holds_until: float | None, until: float) -> None:
        """Send the request and pass on the response. `holds_until`: time up to which the request may wait for a
        frontend; None: not at all. `until`: time of its end in any case. Raises ApiError, but not once the response has
        begun."""
        may_stream = self._outgoing.path in STREAM_PATHS
        opens_at = self._record.started_at + _HEADER_SECONDS if may_stream else math.inf
        opening = StreamOpening(send, self._outgoing.body, opens_at, _PING_SECONDS)
        try:
            await self._answer(send, opening, holds_until, until)
        except asyncio.CancelledError:
            self._attempts.end(CLIENT_LEFT)
            raise
        except ApiError as error:
            self._attempts.end(error.code)
            if not self._has_begun and not opening.is_open:
                raise
            record = self._record
            record.error_code, record.error_status = counted_code(error.code), error.status
            logger.warning("request %s ends in an error: %s", record.request_id, error.message)
            # To return without the last part makes the server drop the connection.
            if not self._has_begun:
                await send({"type": "http.response.body", "body": early_error(record.path, error), "more_body": True})

    async def _answer(self, send: Send, opening: StreamOpening, holds_until: float | None, until: float) -> None:
        """Raises ApiError, also when the response has begun."""
        try:
            async with asyncio.timeout_at(until):
                exchange = await self._sent(opening, holds_until)
                try:
                    await self._pass_on(exchange, opening, send)
                finally:
                    exchange.close()
                self._attempts.end()
        except TimeoutError:
            raise ApiError(408, "deadline_exceeded", "the response was not complete in time") from None

    async def _sent(self, opening: StreamOpening, holds_until: float | None) -> Exchange:
        """Return the exchange whose response has begun. Raises ApiError. Frontends are tried whatever the state is: a
        model may keep some without a replica, and they refuse what is not valid, which then starts nothing."""
        while True:
            reason = ""
            addresses = self._model.addresses
            turn = self._turn % len(addresses)
            for address in (*addresses[turn:], *addresses[:turn]):
                try:
                    return await self._begun(address)
                except UpstreamError as error:
                    reason = str(error)
            if holds_until is None:
                message = f"no frontend of model {str(self._model.key)!r} can be reached ({reason}); retry"
                raise ApiError.from_code("engine_unavailable", message)
            logger.info("request %s waits for a frontend: %s", self._record.request_id, reason)
            await self._hold(opening, holds_until)

    async def _begun(self, address: Address) -> Exchange:
        """Send the request, and wait for the headers of the response. Raises UpstreamError if it may be sent again, as
        after a refusal by a frontend that shuts down, and ApiError if a response had begun or too many frontends were
        lost."""
        while True:
            parts = self._outgoing.parts(address, self._attempts.begin(address))
            try:
                exchange = await self._client.send(address, *parts, fresh=self._losses > 0)
            except UpstreamError:
                self._attempts.end(UNREACHABLE)
                raise
            # A client that leaves before it knows more has made the frontend read its prompt.
            self._early_usage = estimated_usage(len(self._outgoing.body))
            try:
                await exchange.head()
            except UpstreamError as error:
                self._early_usage = Usage(0, 0)
                exchange.close()
                self._attempts.end(LOST)
                if exchange.has_begun:
                    raise ApiError(502, "frontend_lost", f"a frontend was lost while it answered: {error}") from None
                self._losses += 1
                if self._losses >= _MAX_LOSSES:
                    message = f"{self._losses} frontends were lost with the request, the last one because {error}"
                    raise ApiError(502, "frontend_lost", message) from None
                if not exchange.was_reused:
                    raise
                # The server may have closed a connection that had rested: a new one shows whether it is there.
            except BaseException:
                exchange.close()
                raise
            else:
                self._attempts.answered(exchange.status)
                if not await _is_refused(exchange):
                    return exchange
                self._losses += 1
                if self._losses >= _MAX_LOSSES:
                    return exchange
                exchange.close()
                self._attempts.end(REFUSED)
                if not exchange.was_reused:
                    raise UpstreamError("it is shutting down")
                # A Service leads new connections to other frontends.

    async def _hold(self, opening: StreamOpening, until: float) -> None:
        """Wait until a frontend answers. A stream gets its headers and pings meanwhile, as from frontends."""
        size, tenant = len(self._outgoing.body), self._record.tenant
        wait = asyncio.create_task(self._holding.wait(self._model.key, size, tenant, until))
        self._record.is_held, held_at = True, asyncio.get_running_loop().time()
        try:
            await opening.until(lambda: asyncio.shield(wait), until + _PING_SECONDS)
        finally:
            self._record.is_held = False
            self._attempts.add_held(held_at)
            wait.cancel()
            await asyncio.wait({wait})
        self._model = self._holding.current(self._model)

    async def _pass_on(self, exchange: Exchange, opening: StreamOpening, send: Send) -> None:
        received = dict(exchange.headers)
        self._early_usage = read_usage(received.get(_USAGE_HEADER, b"")) or Usage(0, 0)
        is_stream = received.get(b"content-type", b"").startswith(_EVENT_STREAM)
        self._filter = UsageFilter() if is_stream else None
        if not opening.is_open:
            headers = passed_response_headers(exchange.headers, with_length=not is_stream)
            headers += [(name.encode(), value.encode()) for name, value in self._own_headers().items()]
            await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        elif not is_stream:
            # Its status comes too late: it is an error, which the stream has to tell.
            raise error_in(exchange.status, b"".join([piece async for piece in _read(exchange)]))
        self._has_begun = True
        client = self._record.client
        # A body that is no stream has a length, or is short.
        direct = None if client is None or not is_stream else lambda piece: client.write(self._rendered, piece)
        last = b""
        async for piece in _read(exchange, direct):
            passed = self._rendered(piece)
            if exchange.is_read:
                last = passed
            elif passed:
                await send({"type": "http.response.body", "body": passed, "more_body": True})
        if self._filter is not None:
            last += self._filter.rest()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _rendered(self, piece: bytes) -> bytes:
        self._events += events_in(piece)
        return piece if self._filter is None else self._filter.feed(piece)


async def _is_refused(exchange: Exchange) -> bool:
    """Whether the frontend shuts down, and so has not answered. Connections that it had before stay open meanwhile.
    Raises ApiError."""
    if exchange.status != 503:
        return False
    try:
        body = await exchange.whole(_MAX_ERROR_BYTES)
    except UpstreamError as error:
        raise ApiError(502, "frontend_lost", f"a frontend was lost while it answered: {error}") from None
    return error_in(exchange.status, body).code == "shutting_down"


async def _read(exchange: Exchange, direct: Callable[[bytes], bool] | None = None) -> AsyncIterator[bytes]:
    """Iterate over the body of a response. Raises ApiError."""
    try:
        async for piece in exchange.pieces(direct):
            yield piece
    except UpstreamError as error:
        raise ApiError(502, "frontend_lost", f"a frontend was lost while it answered: {error}") from None


class UntilDisconnect:
    """Context that ends in ClientDisconnected when the client closes its connection: ASGI reports that only to a task
    that receives."""

    def __init__(self, receive: Receive, record: RequestRecord) -> None:
        self._receive = receive
        self._record = record
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watcher.cancel()
        if self._has_left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientDisconnected

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        # It is also reported when the response is complete, whose last part may still have to be read.
        if not self._record.response_complete:
            self._has_left = True
            self._task.cancel()
