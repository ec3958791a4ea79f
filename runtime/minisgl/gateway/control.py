"""The control port of a gateway: probes, metrics, and the demand for models, which the operator reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.frontend.server.control_port import control_app, probe, wait_seconds
from minisgl.frontend.server.responses import json_response
from minisgl.gateway.holding import Holding
from minisgl.wire.gateway import GATEWAY_STATUS_PATH


def create_control(
    holding: Holding, problem: Callable[[], str], metrics: Callable[[Request], Awaitable[Response]]
) -> ASGIApp:
    """`problem` returns why the gateway is not ready; empty: it is. `metrics`: endpoint of `/metrics`."""

    async def live(_: Request) -> Response:
        """Respond while the event loop runs."""
        return probe("")

    async def ready(_: Request) -> Response:
        return probe(problem())

    async def status(request: Request) -> Response:
        seconds = wait_seconds(request)
        if seconds and not len(holding):
            await holding.wait_for_arrival(seconds)
        return json_response(holding.status())

    probes = Route("/live", live), Route("/startup", live), Route("/ready", ready)
    return control_app([*probes, Route(GATEWAY_STATUS_PATH, status), Route("/metrics", metrics)])
