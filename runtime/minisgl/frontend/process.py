"""The frontend's process: a bound socket, the HTTP server on it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from minisgl.errors import CodedError
from minisgl.frontend.admin.app import create_admin
from minisgl.frontend.admin.control import create_control
from minisgl.frontend.app import create_app
from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.server.connection import Connection
from minisgl.frontend.server.traffic import Traffic
from minisgl.frontend.server.watchdog import watch
from minisgl.frontend.tokenizers import Tokenizers
from minisgl.router.worker import Worker

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 125
"""Longer than the 90 s for which proxies and connection pools reuse an idle connection: we must not be first to
close it, or a request is lost in the race."""

SHUTTING_DOWN: Final = "shutting_down"
_SHUTTING_DOWN_MESSAGE: Final = "the server is shutting down"

_BACKLOG: Final = 2048
_BREAK_OFF_SECONDS: Final = 2
"""From the error events that end the last streams to the close of their connections by force."""


class ServerError(CodedError):
    """The server cannot start. `code` is stable; the message says what to do next."""


class FrontendServer:
    """Construct, then `run` in the main thread. `fail_all` may come from any thread."""

    def __init__(self, config: FrontendConfig) -> None:
        """Binds the ports. Raises ServerError, KeyFileError, and TokenizerError with a worker of its own."""
        self._config = config
        self._socket = _bind(config)
        self._worker = Worker(config.tokenizer) if config.tokenizer is not None else None
        self._tokenizers = Tokenizers(config.tokenizer_addresses, config.stale_seconds, Traffic(config.limits))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker_error: BaseException | None = None
        self._server = _server(
            create_app(self._tokenizers, config),
            math.ceil(config.drain_seconds) + _BREAK_OFF_SECONDS,
            self._tokenizers.traffic,
        )
        self._admin: _Beside | None = None
        if config.admin_port is not None:
            if config.admin_keys is None:
                raise ServerError("admin_keys_missing", "the administration needs keys: give a file with --admin-keys")
            app = create_admin(self._tokenizers, Path(config.admin_keys))
            self._admin = _Beside(_bind_beside(self._socket, config.admin_port), _server(app, _BREAK_OFF_SECONDS))
        self._control: _Beside | None = None
        if config.control_port is not None:
            app = create_control(self._tokenizers, self._leave_service)
            self._control = _Beside(_bind_everywhere(config.control_port), _server(app, _BREAK_OFF_SECONDS))
        self._stopping = False
        self._takes_until: float | None = None
        """When, on the loop's clock, new requests are refused; None: nobody has asked for an end."""

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def admin_port(self) -> int | None:
        return None if self._admin is None else self._admin.port

    @property
    def control_port(self) -> int | None:
        return None if self._control is None else self._control.port

    def run(self, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT: `leave_seconds` later the listener closes, answers under way go on for
        `drain_seconds`, those that are left end in an error. A second signal ends them at once. `on_ready` gets
        the port once connections are accepted. Raises what ended the worker, where that runs in this process."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(on_ready))
        if self._worker_error is not None:
            raise self._worker_error

    def stop(self) -> None:
        """As SIGTERM does; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    def fail_all(self, message: str) -> None:
        """Something that every answer needs is gone: they end in an error now, and no request is taken any more.
        From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tokenizers.fail_all, "engine_unavailable", message)

    async def _serve(self, on_ready: Callable[[int], None] | None) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
        if on_ready is not None:
            self._server.on_started = partial(on_ready, self.port)
        self._tokenizers.start()
        watchdog = asyncio.create_task(watch(self._tokenizers.traffic))
        beside = [server for server in (self._admin, self._control) if server is not None]
        serving_beside = [asyncio.create_task(server.serve()) for server in beside]
        if self._admin is not None:
            logger.info("the administration listens on port %d", self.admin_port)
        thread = None
        if self._worker is not None:
            thread = threading.Thread(target=self._run_worker, args=(self._worker, loop), name="tokenizer")
            thread.start()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for server in beside:
                server.server.should_exit = True
            await asyncio.gather(*serving_beside)
            watchdog.cancel()
            await self._tokenizers.close()
            if self._worker is not None and thread is not None:
                self._worker.stop()
                await asyncio.to_thread(thread.join)
            self._loop = None

    def _run_worker(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        try:
            worker.serve()
        except BaseException as error:
            logger.exception("the tokenizer worker died")
            self._worker_error = error
            loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping:
            self._break_off()
            self._server.should_exit = self._server.force_exit = True
            return
        self._stopping = True
        self._leave_service()
        assert self._loop is not None and self._takes_until is not None
        if self._takes_until <= self._loop.time():
            self._stop_listening()
        else:
            self._loop.call_at(self._takes_until, self._stop_listening)

    def _leave_service(self) -> None:
        """Not ready from now on; refuse new requests once everybody has had the time to see that."""
        if self._takes_until is not None:
            return
        assert self._loop is not None
        self._takes_until = self._loop.time() + self._config.leave_seconds
        self._tokenizers.leave(_SHUTTING_DOWN_MESSAGE)
        self._loop.call_at(self._takes_until, self._refuse_new)

    def _refuse_new(self) -> None:
        self._tokenizers.refuse_new(SHUTTING_DOWN, _SHUTTING_DOWN_MESSAGE)

    def _stop_listening(self) -> None:
        self._refuse_new()
        self._server.should_exit = True
        assert self._loop is not None
        self._loop.call_later(self._config.drain_seconds, self._break_off)

    def _break_off(self) -> None:
        self._tokenizers.fail_all(SHUTTING_DOWN, "the server is shutting down and cannot complete the answer")


class _Beside(msgspec.Struct, frozen=True):
    """A server on another port."""

    listener: socket.socket
    server: _Server

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    async def serve(self) -> None:
        await self.server.serve(sockets=[self.listener])


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would send itself the signal again at the end, and the exit code would say that it
    was killed."""

    on_started: Callable[[], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_started is not None:
            self.on_started()


def _server(app: ASGIApp, shutdown_seconds: int, traffic: Traffic | None = None) -> _Server:
    """`traffic`: that of `app`, where its requests are counted and logged."""
    return _Server(
        uvicorn.Config(
            app,
            http=partial(Connection, traffic=traffic),  # type: ignore[arg-type]
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_seconds,
        )
    )


def _bind_beside(listener: socket.socket, port: int) -> socket.socket:
    """Another port of the same address. Raises ServerError."""
    beside = socket.socket(listener.family, listener.type)
    beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        host, _, *rest = listener.getsockname()
        beside.bind((host, port, *rest))
    except OSError as error:
        beside.close()
        raise ServerError(
            "cannot_listen", f"cannot listen on port {port}: {error.strerror}. Choose another --admin-port"
        ) from error
    return beside


def _bind_everywhere(port: int) -> socket.socket:
    """On all addresses. Raises ServerError."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=_BACKLOG
        )
    except OSError as error:
        raise ServerError(
            "cannot_listen", f"cannot listen on port {port}: {error.strerror}. Choose another --control-port"
        ) from error


def _bind(config: FrontendConfig) -> socket.socket:
    if config.socket_fd is not None:
        return socket.socket(fileno=config.socket_fd)
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except socket.gaierror as error:
        raise ServerError("bad_host", f"{config.host!r} is no address of this machine ({error}): set --host") from error
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "another process listens there: stop it, or choose another --port",
            errno.EACCES: "ports below 1024 need privileges: choose another --port",
            errno.EADDRNOTAVAIL: "no network interface has this address: set --host 0.0.0.0 or 127.0.0.1",
        }.get(error.errno or 0, f"{error.strerror}: choose another --host or --port")
        raise ServerError("cannot_listen", f"cannot listen on {where}: {remedy}") from error
    return listener


def run(config: FrontendConfig, on_ready: Callable[[int], None] | None = None) -> None:
    """The frontend's process; see `FrontendServer.run`."""
    FrontendServer(config).run(on_ready)
