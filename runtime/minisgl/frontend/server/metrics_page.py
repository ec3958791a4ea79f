"""GET /metrics: what is in memory already. No other process is queried, so a busy engine cannot delay a scrape."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.frontend.metrics.prometheus import CONTENT_TYPE, Snapshot, render
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.logging import LostLines


class MetricsPage:
    """ASGI application."""

    def __init__(self, requests: RequestTracker, lost_lines_fd: int | None) -> None:
        """`lost_lines_fd`: as in FrontendConfig."""
        self._requests = requests
        self._lost_lines_fd = lost_lines_fd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests = self._requests
        if self._lost_lines_fd is not None:
            requests.metrics.lost_lines.value = LostLines.read(self._lost_lines_fd)
        snapshot = Snapshot(
            "" if requests.model is None else requests.model.card.name,
            requests.status,
            requests.step_age(asyncio.get_running_loop().time()),
            requests.phases(),
        )
        await Response(render(requests.metrics, snapshot), media_type=CONTENT_TYPE)(scope, receive, send)
