"""The operator's own HTTP port: /healthz and /readyz for the kubelet, /metrics for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from minisgl_operator.shell.metrics import CONTENT_TYPE

_LAG_PERIOD: Final = 1.0
_LAG_LIMIT: Final = 10.0


class LoopLag:
    """How late the event loop is: a loop that does not get round to a timer does nothing else in time either."""

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
    """`unhealthy` and `unready` say why not, at the moment of the question, or nothing; `page` writes the metrics."""

    def __init__(self, unhealthy: Callable[[], str], unready: Callable[[], str], page: Callable[[], str]) -> None:
        self._unhealthy = unhealthy
        self._unready = unready
        self._page = page
        self._runner: web.AppRunner | None = None

    async def start(self, port: int, host: str = "0.0.0.0") -> int:
        """Listen; return the port, which the system chooses for 0."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", self._answer(self._unhealthy))
        app.router.add_get("/readyz", self._answer(self._unready))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _answer(self, judge: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            reason = judge()
            return web.Response(status=503 if reason else 200, text=(reason or "ok") + "\n")

        return handler

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page().encode(), headers={"Content-Type": CONTENT_TYPE})
