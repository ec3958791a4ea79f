"""The control port of a frontend pod: probes, the replicas it knows, and draining.

It needs no keys: network policies of the cluster restrict who may connect, and web pages are refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.frontend.server.responses import json_response
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.peer_secret import NO_SECRET, PeerSecret
from minisgl.wire.status import MAX_WAIT_SECONDS, SERVING_HEADER, WAIT_PARAMETER, FrontendStatus
from minisgl.wire.web_pages import WebPageError, check_control_request

POD_NAME: Final = "MINISGL_POD_NAME"
"""Environment variable that a cluster sets."""


def create_control(tokenizers: TokenizerPool, drain: Callable[[], None], secret: PeerSecret = NO_SECRET) -> ASGIApp:
    """`drain` is called for each request to /drain. `secret`: the one of the model's pods."""

    async def live(_: Request) -> Response:
        """Respond while the event loop runs, which does all the work. A lost or busy engine is no reason to be
        killed."""
        return _probe("")

    async def ready(_: Request) -> Response:
        return _probe(tokenizers.not_ready_reason() or "")

    async def status(request: Request) -> Response:
        # Words that another version may say are no news.
        if (serving := request.headers.get(SERVING_HEADER)) in ("true", "false"):
            tokenizers.set_serving(serving == "true")
        seconds = _seconds(request.query_params.get(WAIT_PARAMETER, ""))
        if seconds and not tokenizers.num_held and not tokenizers.is_draining:
            await tokenizers.requests.held.wait_for_arrival(seconds)
        return json_response(
            FrontendStatus(
                pod=os.environ.get(POD_NAME, ""),
                ready=tokenizers.not_ready_reason() is None,
                draining=tokenizers.is_draining,
                replicas=tokenizers.replicas(),
                held=tokenizers.num_held,
                running=tokenizers.requests.running,
                idle_seconds=round(tokenizers.requests.idle_seconds(asyncio.get_running_loop().time()), 3),
                peer_secret=secret.fingerprints(),
            )
        )

    async def start_drain(_: Request) -> Response:
        drain()
        return json_response({"draining": True}, 202)

    app = Starlette(
        routes=[
            Route("/live", live),
            Route("/startup", live),
            Route("/ready", ready),
            Route("/status", status),
            Route("/drain", start_drain, methods=["GET", "POST"]),
        ],
        exception_handlers={HTTPException: _on_error},
    )
    return _without_web_pages(app)


def _without_web_pages(app: ASGIApp) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_control_request(Headers(scope=scope).getlist, scope["server"][0])
        except WebPageError as error:
            # The body is not read, so the connection cannot be used again.
            body = {"error": error.message, "code": error.code}
            await json_response(body, 403, {"connection": "close"})(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _seconds(text: str) -> float:
    """Return a wait in seconds; 0 for a text that is none."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(seconds, MAX_WAIT_SECONDS) if seconds > 0 else 0.0


def _probe(problem: str) -> Response:
    return json_response({"ready": not problem, "reason": problem}, 503 if problem else 200)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"error": "use /live, /startup, /ready, /status or /drain"}, error.status_code)
