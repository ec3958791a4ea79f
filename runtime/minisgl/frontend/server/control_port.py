"""What control ports have in common: probes, waits, and the refusal of web pages. They need no keys."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.frontend.server.responses import json_response
from minisgl.wire.status import MAX_WAIT_SECONDS, WAIT_PARAMETER
from minisgl.wire.web_pages import WebPageError, check_control_request


def control_app(routes: Sequence[Route]) -> ASGIApp:
    """Make the application of a control port."""

    async def on_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        *paths, last = [route.path for route in routes if route.path != "/startup"]
        return json_response({"error": f"use {', '.join(paths)} or {last}"}, error.status_code)

    app = Starlette(routes=routes, exception_handlers={HTTPException: on_error})

    async def without_web_pages(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_control_request(Headers(scope=scope).getlist, scope["server"][0])
        except WebPageError as error:
            # The body is not read, so the connection cannot be used again.
            body = {"error": error.message, "code": error.code}
            await json_response(body, 403, {"connection": "close"})(scope, receive, send)
        else:
            await app(scope, receive, send)

    return without_web_pages


def probe(problem: str) -> Response:
    """Respond to a probe. `problem`: why it fails; empty: it does not."""
    return json_response({"ready": not problem, "reason": problem}, 503 if problem else 200)


def wait_seconds(request: Request) -> float:
    """Return the wait that a poll of a status asks for; 0 for a text that is none."""
    try:
        seconds = float(request.query_params.get(WAIT_PARAMETER, ""))
    except ValueError:
        return 0.0
    return min(seconds, MAX_WAIT_SECONDS) if seconds > 0 else 0.0
