"""ASGI middleware of the API's port: each request gets an id, a record, an end in every case, and the limits that are
independent of its content."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.frontend.config import WebAccess
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.client_connection import client_connection
from minisgl.frontend.server.error_body import ANTHROPIC_PATH
from minisgl.frontend.server.gateway_headers import TENANT_HEADER, given_tenant
from minisgl.frontend.server.request_record import TRACE_FIELD, RoutePaths, attach_record, new_record, record_of
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.responses import error_response
from minisgl.frontend.server.web_origins import without_foreign_pages
from minisgl.frontend.server.web_pages import WEB_PAGES

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 64 << 10
"""Largest part of a body of one send. A client has `send_seconds` for each, so that a large body does not
require a faster client than a stream does."""

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", *WEB_PAGES})
"""Paths that need no API key: for probes, Prometheus and browsers."""


def with_middleware(
    app: ASGIApp,
    routes: RoutePaths,
    requests: RequestTracker,
    access: WebAccess,
    authenticated: Callable[[ASGIApp], ASGIApp] | None,
    *,
    on_loopback: bool,
    trusts_gateway: bool = False,
) -> ASGIApp:
    """Wrap `app` in everything that is the same for all paths. `routes`: those of `app`. `authenticated` wraps an
    application in the check of keys; None: every client may use it. `on_loopback`: only this machine can connect.
    `trusts_gateway`: all requests come from a gateway. Raises OriginListError."""
    app = AdmissionMiddleware(app, requests)
    if authenticated is not None:
        app = authenticated(app)
    app = ErrorMiddleware(without_foreign_pages(app, access, on_loopback=on_loopback))
    if access.cors_origins:
        # Errors from inside need CORS headers too, and the middleware raises one of its own.
        app = ErrorMiddleware(
            _CorsMiddleware(
                app,
                allow_origins=access.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "x-ignored-params", "retry-after", "retry-after-ms"),
            )
        )
    return RecordMiddleware(app, routes, requests, trusts_gateway=trusts_gateway)


class RecordMiddleware:
    """Puts a record into the scope of each request and follows its messages. Responses carry the client's
    `x-request-id` or a new one. Unexpected exceptions end here."""

    def __init__(
        self, app: ASGIApp, routes: RoutePaths, requests: RequestTracker, *, trusts_gateway: bool = False
    ) -> None:
        self._app = app
        self._routes = routes
        self._trusts_gateway = trusts_gateway
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        headers = Headers(scope=scope)
        record = new_record(scope["method"], scope["path"], headers, clock())
        record.route, record.route_method = self._routes.match(record.path, record.method)
        client = record.client = client_connection(scope)
        record.address = scope["client"][0] if scope["client"] else ""
        tracer = self._requests.tracer
        # Not the address of the record, which a client may name in a header behind a proxy on this machine.
        record.from_gateway = self._trusts_gateway or self._requests.gateways.include(client.peer, record.started_at)
        if tracer is not None and record.method == "POST":
            record.trace = trace = tracer.begin(
                record.headers.get(TRACE_FIELD, ""), headers, is_trusted=record.from_gateway
            )
            if trace is not None:
                record.headers = {**record.headers, TRACE_FIELD: trace.traceparent(trace.span_id)}
        if record.from_gateway:
            record.given_tenant = given_tenant(headers)
        elif TENANT_HEADER in headers:
            self._requests.metrics.untrusted_tenants.value += 1
        body_seconds = self._requests.limits.body_seconds
        body_until = record.started_at + body_seconds
        body_complete = False
        # Clients of Anthropic's API know the second name.
        id_headers = (b"x-request-id", *([b"request-id"] if record.path.startswith(ANTHROPIC_PATH) else ()))

        async def recorded_receive() -> Message:
            nonlocal body_complete
            if body_complete:
                message = await receive()
            else:
                message = await _receive_in_time(receive, body_until, body_seconds)
                body_complete = not message.get("more_body", False)
            if message["type"] == "http.disconnect" and not record.response_complete:
                record.disconnected_in = record.disconnected_in or record.phase
            return message

        async def recorded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                request_id = record.request_id.encode()
                message["headers"] = [*message["headers"], *((name, request_id) for name in id_headers)]
            elif not message.get("more_body", False):
                body = message.get("body", b"")
                at = 0
                for at in range(_PIECE_BYTES, len(body), _PIECE_BYTES):
                    await timed(send({**message, "body": body[at - _PIECE_BYTES : at], "more_body": True}))
                message["body"] = body[at:]
                record.response_complete = True
            await timed(send(message))
            if record.response_complete:
                await timed(client.wait_flushed())

        async def timed(sending: Awaitable[None]) -> None:
            if record.stream is not None:
                record.stream.unsent_characters = 0
            record.send_started_at = clock()
            await sending
            record.send_started_at = 0.0

        attach_record(scope, record)
        self._requests.in_flight.add(record)
        try:
            await self._app(scope, recorded_receive, recorded_send)
        except Exception:
            # The framework has responded, and where it was not reached, as with /metrics, the server responds with a
            # bare 500; unless the response had begun: then it is cut off here, and the server drops the connection.
            record.error_code, record.error_status = "internal_error", 500
            logger.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            self._requests.end(record, clock())


class _CorsMiddleware(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        message = f"{bytes(response.body).decode()}; allowed origins are set by --cors-origins"
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        raise ApiError(400, "cors_refused", message, headers=kept)


class ErrorMiddleware:
    """Responds with the errors that are raised outside of the framework."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await error_response(scope, error)(scope, receive, send)


class AdmissionMiddleware:
    """Counts POST requests, and rejects those above the limits before their bodies are read, and bodies that would take
    too much memory before they have arrived."""

    def __init__(self, app: ASGIApp, requests: RequestTracker) -> None:
        self._app = app
        self._admission = requests.admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        tenant = record.tenant
        self._admission.begin_request(record.key_name, tenant)
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message.get("more_body", False):
                size = len(message.get("body", b""))
                self._admission.read(size, tenant)
                read += size
            elif read:
                self._admission.forget(read, tenant)
                read = 0
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if read:
                self._admission.forget(read, tenant)
            self._admission.end_request(record.key_name, tenant, record.choices)


async def _receive_in_time(receive: Receive, until: float, seconds: float) -> Message:
    try:
        async with asyncio.timeout_at(until):
            return await receive()
    except TimeoutError:
        # The rest of the body is not read, so the connection cannot be used again.
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, "body_timeout", message, headers={"connection": "close"}) from None
