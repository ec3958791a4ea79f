"""The frontend's process: its ports, the HTTP servers on them, and their shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from minisgl.frontend.admin.app import create_admin
from minisgl.frontend.admin.control import create_control
from minisgl.frontend.app import create_app
from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ENGINE_UNAVAILABLE
from minisgl.frontend.server.http_server import HttpServer
from minisgl.frontend.server.listeners import ServerError, bind, bind_all_addresses, bind_same_host
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.watchdog import watch
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.peer_secret import PeerSecret
from minisgl.wire.web_pages import is_loopback

if TYPE_CHECKING:
    from minisgl.router.worker import Worker

logger = logging.getLogger(__name__)

SHUTTING_DOWN: Final = "shutting_down"
_SHUTTING_DOWN_MESSAGE: Final = "the server is shutting down"

_ABORT_SECONDS: Final = 2
"""Time from the error events that end the last streams to closing their connections by force."""


class FrontendServer:
    """Construct, then `run` in the main thread. `stop` and `fail_all` may be called from any thread."""

    def __init__(self, config: FrontendConfig) -> None:
        """Bind the ports. Raises ServerError, KeyFileError, OriginListError, and TokenizerError with a worker of its
        own."""
        self._config = config
        listener = bind(config)
        self._worker: Worker | None = None
        if config.tokenizer is not None:
            # Imported here: without a worker of its own the process has no native code but that of HTTP.
            from minisgl.router.worker import Worker

            self._worker = Worker(config.tokenizer)
        self._requests = RequestTracker(config.limits, config.traces, "minisgl-frontend")
        self._tokenizers = TokenizerPool(
            config.tokenizer_addresses,
            config.stale_seconds,
            self._requests,
            ready_before_engine=config.ready_before_engine,
            names=config.names,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker_error: BaseException | None = None
        shutdown_seconds = math.ceil(config.drain_seconds) + _ABORT_SECONDS
        on_loopback = is_loopback(listener.getsockname()[0])
        app = create_app(self._tokenizers, config, on_loopback=on_loopback)
        self._server = HttpServer(app, listener, shutdown_seconds, self._requests)
        self._admin: HttpServer | None = None
        if config.access.admin_port is not None:
            if config.access.admin_keys is None:
                raise ServerError("admin_keys_missing", "the admin API needs keys; give a file with --admin-keys")
            app = create_admin(self._tokenizers, Path(config.access.admin_keys), config.access, on_loopback=on_loopback)
            self._admin = HttpServer(
                app, bind_same_host(listener, config.access.admin_port, "--admin-port"), _ABORT_SECONDS
            )
        self._control: HttpServer | None = None
        if config.control_port is not None:
            app = create_control(self._tokenizers, self._start_draining, PeerSecret(config.peer_secret))
            self._control = HttpServer(app, bind_all_addresses(config.control_port), _ABORT_SECONDS)
        self._stopping = False
        self._reject_new_at: float | None = None
        """Time on the loop's clock from which new requests are rejected; None: not draining."""

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def admin_port(self) -> int | None:
        return None if self._admin is None else self._admin.port

    @property
    def control_port(self) -> int | None:
        return None if self._control is None else self._control.port

    def run(self, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT: `leave_seconds` later the listener closes, running requests continue for
        `drain_seconds`, the remaining ones end in an error. A second signal ends them immediately. `on_ready` is
        called with the port once connections are accepted. Raises what ended the worker, if it runs in this process."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(on_ready))
        if self._worker_error is not None:
            raise self._worker_error

    def stop(self) -> None:
        """Do what SIGTERM does; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    def fail_all(self, message: str) -> None:
        """End all responses in an error and take no more requests: something that they need is lost. From any
        thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tokenizers.fail_all, ENGINE_UNAVAILABLE, message)

    async def _serve(self, on_ready: Callable[[int], None] | None) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
        # What exists now stays: without it, a collection of garbage takes no noticeable time.
        gc.collect()
        gc.freeze()
        self._tokenizers.start()
        watchdog = asyncio.create_task(watch(self._requests, self._config.ping_seconds))
        side_servers = [server for server in (self._admin, self._control) if server is not None]
        side_tasks = [asyncio.create_task(server.run_on_port()) for server in side_servers]
        if self._admin is not None:
            logger.info("admin API listening on port %d", self._admin.port)
        thread = None
        if self._worker is not None:
            thread = threading.Thread(target=self._run_worker, args=(self._worker, loop), name="tokenizer")
            thread.start()
        try:
            await self._server.run_on_port(on_ready)
        finally:
            for server in side_servers:
                server.should_exit = True
            await asyncio.gather(*side_tasks)
            watchdog.cancel()
            await self._tokenizers.close()
            if self._worker is not None and thread is not None:
                self._worker.stop()
                await asyncio.to_thread(thread.join)
            if self._requests.tracer is not None:
                await asyncio.to_thread(self._requests.tracer.close)
            self._loop = None

    def _run_worker(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        try:
            worker.serve()
        except BaseException as error:
            logger.exception("tokenizer worker failed")
            self._worker_error = error
            loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping:
            self._fail_rest()
            self._server.should_exit = self._server.force_exit = True
            return
        self._stopping = True
        self._start_draining()
        assert self._loop is not None and self._reject_new_at is not None
        self._loop.call_at(self._reject_new_at, self._stop_listening)

    def _start_draining(self) -> None:
        """Report not ready; reject new requests once clients and load balancers have had the time to see that."""
        if self._reject_new_at is not None:
            return
        assert self._loop is not None
        self._reject_new_at = self._loop.time() + self._config.leave_seconds
        self._tokenizers.start_draining(_SHUTTING_DOWN_MESSAGE)
        self._loop.call_at(self._reject_new_at, self._reject_new)

    def _reject_new(self) -> None:
        self._tokenizers.reject_new(SHUTTING_DOWN, _SHUTTING_DOWN_MESSAGE)

    def _stop_listening(self) -> None:
        self._reject_new()
        self._server.should_exit = True
        assert self._loop is not None
        self._loop.call_later(self._config.drain_seconds, self._fail_rest)

    def _fail_rest(self) -> None:
        self._tokenizers.fail_all(SHUTTING_DOWN, "the server is shutting down and cannot complete the response")
