"""The operator's HTTP port: /healthz and /readyz for the kubelet, /metrics for Prometheus."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from minisgl_operator.shell.metrics import CONTENT_TYPE

_LAG_PERIOD: Final = 1.0
_LAG_LIMIT: Final = 10.0


class LoopLag:
    """Delay of the event loop in seconds, measured with a timer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            start = clock()
            await asyncio.sleep(_LAG_PERIOD)
            self.seconds = max(clock() - start - _LAG_PERIOD, 0)

    def reason(self) -> str:
        return f"the event loop is {self.seconds:.1f} s late" if self.seconds > _LAG_LIMIT else ""


class Health:
    """`health_problem` and `readiness_problem` return the current problem, or ""; `page` renders the metrics."""

    def __init__(
        self, health_problem: Callable[[], str], readiness_problem: Callable[[], str], page: Callable[[], str]
    ) -> None:
        self._health_problem = health_problem
        self._readiness_problem = readiness_problem
        self._page = page
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str | None = None) -> int:
        """Listen on `host`, by default on all addresses; return the port, which the system assigns for 0."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", _handler_of(self._health_problem))
        app.router.add_get("/readyz", _handler_of(self._readiness_problem))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        if host is None:
            site: web.BaseSite = web.SockSite(self._runner, _on_all_addresses(port))
        else:
            site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page().encode(), headers={"Content-Type": CONTENT_TYPE})


def _on_all_addresses(port: int) -> socket.socket:
    """A socket on all IPv6 and IPv4 addresses, or all IPv4 ones where the kernel has no IPv6."""
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack)


def _handler_of(problem: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(_: web.Request) -> web.Response:
        reason = problem()
        return web.Response(status=503 if reason else 200, text=(reason or "ok") + "\n")

    return handler
