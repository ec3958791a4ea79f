"""GET /metrics: what is in memory anyway. Nobody else is asked, so a busy engine cannot make a scrape slow."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from minisgl.frontend.metrics.metrics import CONTENT_TYPE, Snapshot, render
from minisgl.frontend.tokenizers import Tokenizers


class MetricsPage:
    """An ASGI application."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self.render()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def render(self) -> bytes:
        traffic = self._tokenizers.traffic
        model = traffic.model
        return render(
            traffic.metrics,
            Snapshot(
                "" if model is None else model.card.name,
                traffic.status,
                traffic.step_age(asyncio.get_running_loop().time()),
                traffic.phases(),
                traffic.admission.rejections,
            ),
        )
