"""GET /metrics: what is in memory already. No other process is queried, so a busy engine cannot delay a scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.frontend.metrics.process import read_process_use
from minisgl.frontend.metrics.prometheus import CONTENT_TYPE, Snapshot, render
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.logging import LostLines


class MetricsPage:
    """ASGI application."""

    def __init__(
        self,
        requests: RequestTracker,
        names: Callable[[], Sequence[str]],
        knows_load: Callable[[], bool],
        lost_lines_fd: int | None,
    ) -> None:
        """`names` returns those of the model, the first of which is a label; empty: none is known. `knows_load`: as in
        Snapshot. `lost_lines_fd`: as in FrontendConfig."""
        self._requests = requests
        self._names = names
        self._knows_load = knows_load
        self._lost_lines_fd = lost_lines_fd
        self._started_at = time.time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests, names = self._requests, self._names()
        if self._lost_lines_fd is not None:
            requests.metrics.lost_lines.value = LostLines.read(self._lost_lines_fd)
        snapshot = Snapshot(
            names[0] if names else "",
            requests.status,
            requests.step_age(asyncio.get_running_loop().time()),
            requests.phases(),
            self._knows_load(),
            read_process_use(self._started_at),
        )
        await Response(render(requests.metrics, snapshot), media_type=CONTENT_TYPE)(scope, receive, send)
