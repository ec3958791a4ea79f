"""GET /metrics, and the load in a header: what is in memory already. No other process is queried, so a busy engine
cannot delay a scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.frontend.metrics.page import CONTENT_TYPE
from minisgl.frontend.metrics.process import read_process_use
from minisgl.frontend.metrics.prometheus import Snapshot, render
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.logging import LostLines
from minisgl.wire.messages import Status


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


_FORMAT: Final = "endpoint-load-metrics-format"
_NAME: Final = "endpoint-load-metrics"


def load_header(headers: Headers, status: Status | None) -> dict[str, str]:
    """Return the header `endpoint-load-metrics`, from which load balancers learn the load of an endpoint (ORCA: Open
    Request Cost Aggregation), with the metrics that vLLM puts there, summed over all engines. Its format is the one
    that the request's `headers` ask for, `TEXT` or `JSON`; there is none if they ask for no known format, or while no
    engine has reported its status."""
    if status is None:
        return {}
    metrics = {
        "kv_cache_usage_perc": status.used_pages / max(status.num_pages, 1),
        "num_requests_waiting": float(status.waiting),
    }
    match headers.get(_FORMAT, "").strip().upper():
        case "TEXT":
            return {_NAME: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())}
        case "JSON":
            return {_NAME: "JSON " + msgspec.json.encode({"named_metrics": metrics}).decode()}
    return {}
