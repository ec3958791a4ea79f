"""The ASGI application of the API's port: which requests are forwarded, and the answers of the gateway itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.frontend.config import WebAccess
from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.openapi import openapi
from minisgl.frontend.responses.other_routes import compact_response, stored_response
from minisgl.frontend.server.gateway_headers import PRIORITY_HEADER, TENANT_HEADER
from minisgl.frontend.server.json_body import read_json_body
from minisgl.frontend.server.middleware import OPEN_PATHS, with_middleware
from minisgl.frontend.server.request_record import RoutePaths, record_of
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.responses import json_response, on_error
from minisgl.frontend.server.usage_report import REQUEST_HEADER
from minisgl.frontend.server.web_pages import WEB_PAGES, web_page
from minisgl.gateway.bodies import KeptBodies, requested_model, with_model
from minisgl.gateway.config import MAX_BODY_BYTES
from minisgl.gateway.directory import Directory
from minisgl.gateway.forwarding import Forwarding, Outgoing, UntilDisconnect
from minisgl.gateway.headers import passed_request_headers
from minisgl.gateway.holding import Holding, check_serves
from minisgl.gateway.listing import listed_models, model_entry
from minisgl.gateway.metrics import GatewayMetricsPage, UseTotals
from minisgl.gateway.models import Model
from minisgl.gateway.paths import GENERATION_PATHS, INFORMATION_PATHS, POST_PATHS, split_path
from minisgl.gateway.routing import Target, everything, served_name
from minisgl.gateway.tenancy import Account, Tenancy
from minisgl.gateway.upstream import Client
from minisgl.version import __version__

_TARGET: Final = "minisgl.target"
_ACCOUNT: Final = "minisgl.account"
"""Keys in the ASGI scope."""


class Gateway:
    """What all requests share. All methods belong to the event loop."""

    def __init__(
        self, client: Client, directory: Directory, holding: Holding, tenancy: Tenancy, requests: RequestTracker
    ) -> None:
        self.client = client
        self.directory = directory
        self.holding = holding
        self.tenancy = tenancy
        self.requests = requests
        self.totals = UseTotals()
        self._bodies = KeptBodies()
        self._turns = count()

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request with a body. Raises ApiError and ClientDisconnected."""
        record = record_of(scope)
        body = await read_json_body(scope, receive, MAX_BODY_BYTES)
        name = requested_model(body)
        model = self.model(scope, name)
        record.model = str(model.key)
        check_serves(model)
        if (known := served_name(model, name)) is not None:
            body = with_model(body, known)
        with self._bodies.keep(len(body), record.tenant):
            holds = scope["path"] in GENERATION_PATHS
            if not holds:
                await self._forward(scope, receive, send, model, body, holds=False)
                return
            # Not before: a request that is refused does not use the model, and must not start it.
            self.holding.begin(model.key)
            try:
                await self._forward(scope, receive, send, model, body, holds=True)
            finally:
                self.holding.end(model.key)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request for information about a model. Raises ApiError and ClientDisconnected."""
        model = self.model(scope, None)
        record_of(scope).model = str(model.key)
        check_serves(model)
        await self._forward(scope, receive, send, model, b"", holds=False)

    def model(self, scope: Scope, name: str | None) -> Model:
        """Return the model that a request is for. Raises ApiError."""
        if self.directory.problem:
            raise ApiError(503, "not_ready", f"{self.directory.problem}; retry")
        return self.directory.table.find(name, self.target(scope), self.allowed(scope))

    def target(self, scope: Scope) -> Target | None:
        """Return the model that the path or the header Host of a request names."""
        found: Target | None = scope.get(_TARGET)
        return found or self.directory.table.target_of_host(Headers(scope=scope).get("host", ""))

    def allowed(self, scope: Scope) -> Callable[[Model], bool]:
        """Return a function that tells whether the tenant of a request may use a model."""
        account = _account(scope)
        return everything if account is None else account.tenant.allows

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, model: Model, body: bytes, *, holds: bool
    ) -> None:
        record, account = record_of(scope), _account(scope)
        clock, limits = asyncio.get_running_loop().time, self.requests.limits
        if account is not None:
            account.begin(clock())
        forwarding = Forwarding(
            self.client,
            self.holding,
            record,
            model,
            next(self._turns),
            Outgoing("POST" if body else "GET", scope["path"], scope["query_string"], self._headers(scope), body),
            lambda: {} if account is None else account.headers(clock()),
        )
        try:
            async with UntilDisconnect(receive, record):
                await forwarding.answer(
                    send,
                    holds_until=record.started_at + limits.queue_seconds if holds else None,
                    until=record.started_at + limits.request_seconds,
                )
        finally:
            if account is not None:
                account.end(forwarding.usage.total, clock())
            if holds:
                self.totals.add(record.key_name, model.key, forwarding.usage)

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request for a frontend."""
        record, account = record_of(scope), _account(scope)
        own = {
            "x-request-id": record.request_id,
            "x-forwarded-for": record.address,
            TENANT_HEADER: record.tenant,
            REQUEST_HEADER: "1",
        }
        if account is not None:
            own[PRIORITY_HEADER] = str(account.tenant.priority)
        passed = passed_request_headers(scope["headers"], with_keys=not self.tenancy.needs_keys)
        return passed + [(name.encode(), value.encode()) for name, value in own.items()]


def create_gateway(gateway: Gateway, access: WebAccess, *, on_loopback: bool) -> ASGIApp:
    """Make the application. `on_loopback`: only this machine can connect. Raises OriginListError."""

    async def health(_: Request) -> Response:
        """Respond while the event loop runs."""
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        if gateway.directory.problem:
            raise ApiError(503, "not_ready", gateway.directory.problem)
        return json_response({"status": "ready", "models": len(gateway.directory.table)})

    async def models(request: Request) -> Response:
        allowed = gateway.allowed(request.scope)
        if gateway.directory.problem:
            raise ApiError(503, "not_ready", gateway.directory.problem)
        if gateway.target(request.scope) is not None:
            found = gateway.model(request.scope, None)
            return json_response({"object": "list", "data": [model_entry(found, name) for name in found.names]})
        return json_response(listed_models(gateway.directory.table, allowed))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(model_entry(gateway.model(request.scope, name), name))

    async def version(_: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi_document(_: Request) -> Response:
        return json_response(openapi(None))

    forward = dict.fromkeys(POST_PATHS, _Endpoint(gateway.post))
    information = _Endpoint(gateway.get)
    requests = gateway.requests
    metrics = GatewayMetricsPage(
        gateway.directory.table,
        gateway.totals,
        requests.metrics,
        lambda: len(gateway.holding),
        lambda: len(requests.in_flight),
    )
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in sorted(forward.items())),
        *(Route(path, information, methods=["GET"]) for path in sorted(INFORMATION_PATHS)),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/responses/compact", compact_response, methods=["POST"]),
        Route("/v1/responses/{name:path}", stored_response, methods=["GET", "POST", "DELETE"]),
        Route("/version", version),
        Route("/openapi.json", openapi_document),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/ready", ready),
        Route("/metrics", metrics.__call__, methods=["GET"]),
        *(Route(path, web_page) for path in WEB_PAGES),
    ]
    others = Starlette(
        routes=routes, exception_handlers={ApiError: on_error, HTTPException: on_error, Exception: on_error}
    )
    others.router.redirect_slashes = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # To find these in the list of routes takes longer than to forward them.
        endpoint = forward.get(scope["path"]) if scope["method"] == "POST" else None
        await (others if endpoint is None else endpoint)(scope, receive, send)

    authenticated = (lambda inner: _KeyMiddleware(inner, gateway.tenancy)) if gateway.tenancy.needs_keys else None
    wrapped = with_middleware(app, RoutePaths(routes), requests, access, authenticated, on_loopback=on_loopback)
    return _with_targets(wrapped)


class _Endpoint:
    """ASGI application of paths that are forwarded."""

    def __init__(self, forward: ASGIApp) -> None:
        self._forward = forward

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        try:
            await self._forward(scope, receive, send)
        except ClientDisconnected:
            return


class _KeyMiddleware:
    """Rejects requests without a valid key, except those to open paths."""

    def __init__(self, app: ASGIApp, tenancy: Tenancy) -> None:
        self._app = app
        self._tenancy = tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        if scope["path"] not in OPEN_PATHS:
            account = self._tenancy.account(Headers(scope=scope))
            if account is not None:
                scope[_ACCOUNT] = account
                record_of(scope).key_name = account.tenant.name
        await self._app(scope, receive, send)


def _with_targets(app: ASGIApp) -> ASGIApp:
    """Wrap the application so that it sees the paths of the API alone, beside the model that a path names."""

    async def split(scope: Scope, receive: Receive, send: Send) -> None:
        target, path = split_path(scope["path"])
        if target is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), _TARGET: target}
        await app(scope, receive, send)

    return split


def _account(scope: Scope) -> Account | None:
    account: Account | None = scope.get(_ACCOUNT)
    return account
