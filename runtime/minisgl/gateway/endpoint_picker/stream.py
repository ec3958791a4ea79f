"""One stream of external processing: a request, the endpoint that is picked for it, and its response.

Nothing is answered before the body of the request is there and an endpoint is picked, except to proxies that send whole
bodies, which wait for an answer to the headers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.server.error_body import ANTHROPIC_PATH, error_body
from minisgl.frontend.server.json_body import read_json_body
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.usage_report import REQUEST_HEADER
from minisgl.gateway.bodies import requested_model, with_model
from minisgl.gateway.config import MAX_BODY_BYTES
from minisgl.gateway.endpoint_picker import messages
from minisgl.gateway.endpoint_picker.answer import Answer
from minisgl.gateway.endpoint_picker.incoming import Incoming
from minisgl.gateway.endpoint_picker.picker import Picker
from minisgl.gateway.endpoint_picker.picks import Pick
from minisgl.gateway.endpoint_picker.request import check_header_size, model_header, read_request, trace_headers
from minisgl.gateway.handler import ACCOUNT, account_of, checked_hops
from minisgl.gateway.headers import dropped_by_picker
from minisgl.gateway.holding import check_serves
from minisgl.gateway.models import Model
from minisgl.gateway.paths import GENERATION_PATHS, POST_PATHS, USE_PATHS, is_known
from minisgl.gateway.routing import served_name
from minisgl.gateway.usage import usage_attributes


class BadStream(Exception):
    """The messages of a stream are not those of one request. It is closed, and the proxy says so to its client."""


class StreamTimeout(Exception):
    """The request did not begin, or its response was not complete, in time."""


class Stream:
    """Construct, then `run`. One task does."""

    def __init__(
        self, picker: Picker, read: Callable[[], Coroutine[Any, Any, Any]], write: Callable[[Any], Awaitable[None]]
    ) -> None:
        """`read` returns the next message; None: there is none."""
        self._picker = picker
        self._gateway = picker.gateway
        self._incoming = Incoming(read)
        self._write = write
        self._clock = asyncio.get_running_loop().time
        self._request_mode = self._response_mode = messages.FULL_DUPLEX
        self._hint: frozenset[str] | None = None
        self._has_body = False
        """The proxy sends the body of the request here."""
        self._passes_unseen = False
        """It sends the body to the frontend alone."""
        self._body = b""
        """As the frontend gets it; empty once it is on its way."""
        self._kept_bytes = 0
        """Bytes of the body that room was taken for."""
        self._is_changed = False
        """It differs from the client's."""
        self._has_trailers = False
        self._is_picked = False

    async def run(self) -> None:
        """Process one request to its end. Raises BadStream, StreamTimeout, and ClientDisconnected if the proxy ends the
        stream before an endpoint is picked: it must not take this for a permission."""
        try:
            first = await self._first()
            if first is None or first.observability_mode:
                # A proxy that only observes expects no answers.
                return
            if first.WhichOneof("request") != "request_headers":
                raise BadStream("the first message has no request headers; the proxy must send them")
            scope, record = read_request(first, self._clock(), self._gateway.requests.tracer)
            await self._run(first, scope, record)
        finally:
            self._incoming.close()

    async def _first(self) -> Any:
        """Raises StreamTimeout."""
        try:
            async with asyncio.timeout(self._gateway.requests.limits.body_seconds):
                return await self._incoming.next()
        except TimeoutError:
            raise StreamTimeout("no request came in time") from None

    async def _run(self, first: Any, scope: Scope, record: RequestRecord) -> None:
        requests = self._gateway.requests
        requests.in_flight.add(record)
        try:
            async with self._limited(record):
                check_header_size(first)
                self._read_modes(first)
                await self._process(scope, record)
        except ApiError as error:
            await self._refuse(error, scope, record)
        except ClientDisconnected:
            record.disconnected_in = record.phase
            raise
        except BadStream:
            record.error_code, record.error_status = "invalid_request", 400
            raise
        except asyncio.CancelledError:
            if not record.response_complete:
                record.disconnected_in = record.phase
            raise
        finally:
            requests.end(record, self._clock())

    def _read_modes(self, first: Any) -> None:
        """Read how the proxy sends bodies. Raises ApiError."""
        self._request_mode, self._response_mode = messages.body_modes(first)
        self._hint = messages.subset_hint(first)
        has_body = not first.request_headers.end_of_stream
        self._passes_unseen = has_body and self._request_mode == messages.NONE
        self._has_body = has_body and not self._passes_unseen
        if self._has_body and self._request_mode not in (messages.FULL_DUPLEX, messages.BUFFERED):
            message = "the Gateway sends bodies in part, after the request has left; set FULL_DUPLEX_STREAMED"
            raise ApiError(500, "internal_error", message)

    @asynccontextmanager
    async def _limited(self, record: RequestRecord) -> AsyncIterator[None]:
        """Limit the time of a request. Raises ApiError, and StreamTimeout once its response may have begun."""
        try:
            async with asyncio.timeout_at(record.started_at + self._gateway.requests.limits.request_seconds):
                yield
        except TimeoutError:
            if self._is_picked:
                record.error_code, record.error_status = "deadline_exceeded", 408
                raise StreamTimeout("the response was not complete in time") from None
            raise ApiError(408, "deadline_exceeded", "the response was not complete in time") from None

    async def _process(self, scope: Scope, record: RequestRecord) -> None:
        """Raises ApiError, ClientDisconnected and BadStream."""
        account = await self._gateway.tenancy.account(Headers(scope=scope))
        if account is not None:
            scope[ACCOUNT] = account
            record.key_name = account.tenant.name
        if not is_known(scope["path"]):
            raise ApiError(404, "not_found", "path not found")
        admission, tenant = self._gateway.requests.admission, record.tenant
        admission.begin_request(record.key_name, tenant)
        try:
            model = await self._model(scope, record)
            await self._use(scope, record, model)
        finally:
            self._drop_body(tenant)
            admission.end_request(record.key_name, tenant)

    async def _model(self, scope: Scope, record: RequestRecord) -> Model:
        """Return the model of the request, whose body has been read. Raises ApiError, ClientDisconnected and
        BadStream."""
        if self._has_body:
            self._body = await self._read_body(scope, record)
        names_model = scope["method"] == "POST" and scope["path"] in POST_PATHS and not self._passes_unseen
        name = requested_model(self._body) if names_model else None
        model = self._gateway.model(scope, name or model_header(scope), self._picker.serves)
        record.model = str(model.key)
        check_serves(model)
        if (known := served_name(model, name)) is not None:
            self._body, self._is_changed = with_model(self._body, known), True
        return model

    async def _read_body(self, scope: Scope, record: RequestRecord) -> bytes:
        """Return the body of the request, for which room is taken. Raises ApiError, ClientDisconnected and
        BadStream."""
        limits = self._gateway.requests.limits
        is_whole = self._request_mode == messages.BUFFERED
        if is_whole:
            await self._write(messages.unchanged_headers())

        async def receive() -> Message:
            message = await self._incoming.next()
            if message is None:
                return {"type": "http.disconnect"}
            kind = message.WhichOneof("request")
            if self._hint is None:
                self._hint = messages.subset_hint(message)
            if kind == "request_trailers":
                self._has_trailers = True
                return {"type": "http.request", "body": b"", "more_body": False}
            if kind != "request_body":
                raise BadStream(f"{kind} came before the end of the request's body")
            piece = message.request_body.body
            self._gateway.bodies.take(len(piece), record.tenant)
            self._kept_bytes += len(piece)
            # Of a whole body with trailers, the end is not said.
            ends = message.request_body.end_of_stream or is_whole
            return {"type": "http.request", "body": piece, "more_body": not ends}

        try:
            async with asyncio.timeout_at(record.started_at + limits.body_seconds):
                return await read_json_body(scope, receive, MAX_BODY_BYTES)
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_seconds:g} s"
            raise ApiError(408, "body_timeout", message) from None

    def _drop_body(self, tenant: str) -> None:
        """Give back the room of the body: the proxy keeps it for another try."""
        self._gateway.bodies.give_back(self._kept_bytes, tenant)
        self._body, self._kept_bytes = b"", 0

    async def _use(self, scope: Scope, record: RequestRecord, model: Model) -> None:
        """Pick an endpoint of the model, and follow the response. Raises ApiError, ClientDisconnected and BadStream."""
        gateway, account = self._gateway, account_of(scope)
        holds = scope["method"] == "POST" and scope["path"] in GENERATION_PATHS
        answer = Answer(record, self._response_mode)
        pick = None
        passed_gateways = checked_hops(scope)
        if account is not None:
            await account.admit(self._clock)
        if holds:
            gateway.holding.begin(model.key)
        try:
            while holds and not self._picker.has_endpoints(model):
                model = await self._incoming.unless_ended(self._picker.hold(model, record, len(self._body)))
            endpoints = self._picker.endpoints(model, self._hint)
            pick = Pick(self._picker.picks, endpoints)
            self._is_picked = True
            size = len(self._body)
            await self._send_on(scope, record, endpoints, passed_gateways)
            self._drop_body(record.tenant)
            answer.begin(size)
            await self._follow(answer, pick, lambda: {} if account is None else account.headers(self._clock()))
            if answer.is_cut_off:
                record.disconnected_in = record.phase
        finally:
            if holds:
                # First, so that no fault of what follows keeps the model awake.
                gateway.holding.end(model.key)
            if pick is not None:
                pick.end()
            if record.trace is not None and holds:
                record.trace.attributes.update(usage_attributes(answer.usage))
            if account is not None:
                account.end(answer.usage.total, self._clock())
            if pick is not None and (holds or scope["path"] in USE_PATHS - GENERATION_PATHS):
                gateway.totals.add(record.key_name, model.key, answer.usage)

    async def _send_on(
        self, scope: Scope, record: RequestRecord, endpoints: Sequence[str], passed_gateways: int
    ) -> None:
        """Tell the proxy the endpoints, and return the body to it."""
        own = self._gateway.own_headers(scope, passed_gateways) | trace_headers(record)
        if self._response_mode in (messages.FULL_DUPLEX, messages.STREAMED):
            # Otherwise the report would not pass here, and reach the client.
            own[REQUEST_HEADER] = "1"
        dropped = dropped_by_picker(
            scope["headers"],
            with_keys=not self._gateway.tenancy.needs_keys,
            with_trace=self._gateway.requests.tracer is None,
        )
        removed = [name for name in dropped if name not in own]
        if self._has_body and self._request_mode == messages.BUFFERED:
            changed = self._body if self._is_changed else None
            await self._write(messages.picked_with_body(endpoints, own, removed, changed))
        else:
            await self._write(messages.picked_with_headers(endpoints, own, removed))
            if self._has_body:
                for piece in messages.body_pieces(self._body, ends=not self._has_trailers):
                    await self._write(piece)
        if self._has_trailers:
            await self._write(messages.request_trailers())

    async def _follow(self, answer: Answer, pick: Pick, own_headers: Callable[[], dict[str, str]]) -> None:
        """Pass on the response until the stream ends. `own_headers` returns the gateway's headers of it. Raises
        BadStream."""
        while (message := await self._incoming.next()) is not None:
            if not pick.is_served and (served := messages.served_endpoint(message)) is not None:
                pick.served_by(served)
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                await self._write(answer.headers(message.response_headers, own_headers()))
            elif kind == "response_body":
                await self._write(answer.piece(message.response_body))
            elif kind == "response_trailers":
                for each in answer.trailers():
                    await self._write(each)
            elif kind == "request_trailers" and not self._has_trailers:
                self._has_trailers = True
                await self._write(messages.request_trailers())
            else:
                raise BadStream(f"{kind or 'a message without content'} came after the request")

    async def _refuse(self, error: ApiError, scope: Scope, record: RequestRecord) -> None:
        """Answer in the place of a frontend. Raises StreamTimeout if the proxy does not read it."""
        record.error_code, record.error_status = error.code, error.status
        record.status = error.status
        headers = {name: value for name, value in error.headers.items() if name != "connection"}
        headers |= {"content-type": "application/json", "x-request-id": record.request_id}
        if scope["path"].startswith(ANTHROPIC_PATH):
            headers["request-id"] = record.request_id
        body = error_body(error, scope["path"], record.request_id)
        try:
            async with asyncio.timeout(self._gateway.requests.limits.send_seconds):
                await self._write(messages.immediate(error.status, headers, body, f"minisgl_{error.code}"))
        except TimeoutError:
            raise StreamTimeout("the proxy did not read the answer in time") from None
        record.response_complete = True
