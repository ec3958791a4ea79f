"""The control port of a frontend pod: probes, the replicas it knows, and draining.

It needs no keys: network policies of the cluster restrict who may connect, and web pages are refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.frontend.server.control_port import control_app, probe, wait_seconds
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.peer_secret import NO_SECRET, PeerSecret
from minisgl.wire.status import GATEWAYS_HEADER, SERVING_HEADER, FrontendStatus

POD_NAME: Final = "MINISGL_POD_NAME"
"""Environment variable that a cluster sets."""
HEARS_GATEWAYS: Final = "MINISGL_HEARS_GATEWAYS"
"""Environment variable that the operator sets to `true` where nobody else reaches this port: polls may then name the
addresses of the gateway."""


def create_control(tokenizers: TokenizerPool, drain: Callable[[], None], secret: PeerSecret = NO_SECRET) -> ASGIApp:
    """`drain` is called for each request to /drain. `secret`: the one of the model's pods."""
    hears_gateways = os.environ.get(HEARS_GATEWAYS) == "true"

    async def live(_: Request) -> Response:
        """Respond while the event loop runs, which does all the work. A lost or busy engine is no reason to be
        killed."""
        return probe("")

    async def ready(_: Request) -> Response:
        return probe(tokenizers.not_ready_reason() or "")

    async def status(request: Request) -> Response:
        # Words that another version may say are no news.
        if (serving := request.headers.get(SERVING_HEADER)) in ("true", "false"):
            tokenizers.set_serving(serving == "true")
        if hears_gateways and (gateways := request.headers.get(GATEWAYS_HEADER)) is not None:
            tokenizers.requests.gateways.name(gateways, asyncio.get_running_loop().time())
        seconds = wait_seconds(request)
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

    return control_app(
        [
            Route("/live", live),
            Route("/startup", live),
            Route("/ready", ready),
            Route("/status", status),
            Route("/drain", start_drain, methods=["GET", "POST"]),
        ]
    )
