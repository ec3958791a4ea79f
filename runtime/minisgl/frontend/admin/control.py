"""The control port of a frontend pod: probes, what it knows of the engines, and a way to take it out of service. No
keys: who may connect is the cluster's to say."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.frontend.tokenizers import Tokenizers
from minisgl.wire.status import FrontendStatus

POD_NAME: Final = "MINISGL_POD_NAME"
"""Environment variable that a cluster sets."""


def create_control(tokenizers: Tokenizers, drain: Callable[[], None]) -> ASGIApp:
    """`drain` is called when somebody asks for it, each time."""

    async def live(_: Request) -> Response:
        """The event loop runs, which has all the work. An engine that is lost or busy is no reason to be killed."""
        return _probe("")

    async def ready(_: Request) -> Response:
        return _probe(tokenizers.not_ready() or "")

    async def status(_: Request) -> Response:
        return _json(
            FrontendStatus(
                pod=os.environ.get(POD_NAME, ""),
                ready=tokenizers.not_ready() is None,
                draining=tokenizers.is_leaving,
                replicas=tokenizers.replicas(),
            )
        )

    async def start_drain(_: Request) -> Response:
        drain()
        return _json({"draining": True}, 202)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/startup", live),
            Route("/ready", ready),
            Route("/status", status),
            Route("/drain", start_drain, methods=["GET", "POST"]),
        ],
        exception_handlers={HTTPException: _on_error},
    )


def _probe(problem: str) -> Response:
    return _json({"ready": not problem, "reason": problem}, 503 if problem else 200)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": "only /live, /startup, /ready, /status and /drain are answered here"}, error.status_code)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
