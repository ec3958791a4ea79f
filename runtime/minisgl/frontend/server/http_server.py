"""uvicorn with our connections, on one bound socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from minisgl.frontend.server.connection import Connection, OpenFiles
from minisgl.frontend.server.listeners import BACKLOG
from minisgl.frontend.server.request_tracker import RequestTracker

KEEP_ALIVE_SECONDS: Final = 125
"""Longer than the 90 s for which proxies and connection pools reuse an idle connection: if we were first to close it,
a request would be lost in the race."""


class HttpServer(uvicorn.Server):
    """Serves one application on one port until `should_exit` is set."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, shutdown_seconds: int, requests: RequestTracker | None = None
    ) -> None:
        """`requests`: records the requests that are rejected before they reach `app`."""
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, requests=requests, open_files=OpenFiles()),  # type: ignore[arg-type]
                loop="none",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=shutdown_seconds,
            )
        )
        self._listener = listener
        self._on_ready: Callable[[int], None] | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def run_on_port(self, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve. `on_ready` is called with the port once connections are accepted."""
        self._on_ready = on_ready
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self.port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us: uvicorn would send itself the signal again at the end, and the exit code would claim
        that it was killed."""
        yield
