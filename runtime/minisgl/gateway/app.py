"""The ASGI application of the API's port: which requests are forwarded, and what the gateway answers itself."""

from __future__ import annotations

from collections.abc import Callable
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
from minisgl.frontend.server.middleware import OPEN_PATHS, with_middleware
from minisgl.frontend.server.request_record import RoutePaths, record_of
from minisgl.frontend.server.responses import json_response, on_error
from minisgl.frontend.server.web_pages import WEB_PAGES, web_page
from minisgl.gateway.handler import ACCOUNT, TARGET, Gateway
from minisgl.gateway.listing import listed_models, model_entry
from minisgl.gateway.metrics import GatewayMetricsPage
from minisgl.gateway.paths import INFORMATION_PATHS, POST_PATHS, split_path
from minisgl.gateway.tenancy import Tenancy
from minisgl.version import __version__


def create_gateway(gateway: Gateway, access: WebAccess, problem: Callable[[], str], *, on_loopback: bool) -> ASGIApp:
    """Make the application. `problem` returns why the gateway is not ready; empty: it is. `on_loopback`: only this
    machine can connect. Raises OriginListError."""

    async def health(_: Request) -> Response:
        """Respond while the event loop runs."""
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        if reason := problem():
            raise ApiError(503, "not_ready", reason)
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
        Route("/metrics", metrics_page(gateway).__call__, methods=["GET"]),
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


_OPEN_PATHS: Final = OPEN_PATHS - {"/metrics"}
"""The control port has metrics without a key: they name all tenants and their use."""


def metrics_page(gateway: Gateway) -> GatewayMetricsPage:
    """Endpoint of `/metrics`."""
    requests = gateway.requests
    return GatewayMetricsPage(
        gateway.directory.table,
        gateway.totals,
        requests.metrics,
        lambda: len(gateway.holding),
        lambda: len(requests.in_flight),
        None if gateway.tenancy.identities is None else gateway.tenancy.identities.provider,
        gateway.tenancy.shared,
    )


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
    """Rejects requests without a valid key or access token, except those to open paths."""

    def __init__(self, app: ASGIApp, tenancy: Tenancy) -> None:
        self._app = app
        self._tenancy = tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        if scope["path"] not in _OPEN_PATHS:
            account = await self._tenancy.account(Headers(scope=scope))
            if account is not None:
                scope[ACCOUNT] = account
                record_of(scope).key_name = account.tenant.name
        await self._app(scope, receive, send)


def _with_targets(app: ASGIApp) -> ASGIApp:
    """Wrap the application so that it sees the paths of the API alone, beside the model that a path names."""

    async def split(scope: Scope, receive: Receive, send: Send) -> None:
        target, path = split_path(scope["path"])
        if target is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), TARGET: target}
        await app(scope, receive, send)

    return split
