"""The gateway's process: its sources, the HTTP servers on its ports, and their shutdown."""

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

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.http_server import HttpServer
from minisgl.frontend.server.listeners import bind_address, bind_same_host
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.watchdog import watch
from minisgl.gateway.app import create_gateway, metrics_page
from minisgl.gateway.backends import Backends, parse_backend
from minisgl.gateway.cluster import ClusterModels, SecretKeys
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.config import LEAVE_SECONDS, GatewayOptions
from minisgl.gateway.control import create_control
from minisgl.gateway.directory import Directory, Source
from minisgl.gateway.endpoint_picker.endpoints import ClusterEndpoints, check_backends, of_backends
from minisgl.gateway.handler import Gateway
from minisgl.gateway.holding import Holding
from minisgl.gateway.identities import Identities
from minisgl.gateway.key_file import FileKeys
from minisgl.gateway.provider import Provider, ProviderError
from minisgl.gateway.routing import everything
from minisgl.gateway.shared_limits import SharedLimits
from minisgl.gateway.tenancy import Keys, Tenancy
from minisgl.gateway.tokens import TokenRules
from minisgl.gateway.upstream import Client
from minisgl.wire.web_pages import is_loopback

if TYPE_CHECKING:
    from minisgl.gateway.endpoint_picker.server import PickerServer

logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 5.0
_ABORT_SECONDS: Final = 2
"""Time from the end of the last requests to closing their connections by force."""
_PING_SECONDS: Final = math.inf
"""Frontends keep silent streams open themselves."""


class GatewayServer:
    """Construct, then `run` in the main thread. `stop` may be called from any thread."""

    def __init__(self, options: GatewayOptions, access: ClusterAccess | None = None) -> None:
        """Bind the ports. `access`: of the cluster, if no backends are given; None: that of this pod. Raises
        ServerError, ClusterError, BackendError, KeyFileError, ProviderError, RedisError and OriginListError."""
        self._options = options
        backends = [parse_backend(url) for url in options.backends]
        self._identities = _identities(options)
        by_tokens = self._identities is not None
        self._shared = SharedLimits(options.redis) if options.redis.url else None
        file_keys = None if options.keys is None else FileKeys(Path(options.keys), by_tokens=by_tokens)
        if access is None and (not backends or options.key_secrets):
            access = ClusterAccess.from_pod()
        self._backends, self._file_keys, self._access = backends, file_keys, access
        if options.endpoint_picker_port is not None:
            check_backends(backends)
        self._listener = bind_address(options.host, options.port)
        self._control_listener = bind_same_host(self._listener, options.control_port, "--control-port")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: list[HttpServer] = []
        self._holding: Holding | None = None
        self._picker: PickerServer | None = None
        self._endpoints: ClusterEndpoints | None = None
        """Those of the picker, in a cluster."""
        self._stops: list[asyncio.Task[None]] = []
        """Ends of the endpoint picker, which are in progress."""
        self._stopping = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def control_port(self) -> int:
        return int(self._control_listener.getsockname()[1])

    @property
    def endpoint_picker_port(self) -> int:
        """Port of the endpoint picker, once it serves."""
        assert self._picker is not None
        return self._picker.port

    def run(self, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT: the listener closes a while later, so that a cluster notices, and requests
        that run or wait finish within the time for that. A second signal ends them immediately. `on_ready` is called
        with the port once connections are accepted."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(on_ready))

    def stop(self) -> None:
        """Do what SIGTERM does; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    async def serve(self, on_ready: Callable[[int], None] | None = None) -> None:
        """Do what `run` does, in the running loop."""
        options = self._options
        loop = self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
        client, directory = Client(_CONNECT_SECONDS), Directory()
        requests = RequestTracker(
            RequestLimits(
                waiting=options.limits.waiting,
                held_bytes=options.limits.held_bytes,
                queue_seconds=options.limits.queue_seconds,
                request_seconds=options.limits.request_seconds,
            ),
            options.traces,
            "minisgl-gateway",
        )
        holding = Holding(client, directory.table.get, requests.admission, options.limits.held_bytes)
        self._holding = holding
        directory.on_change(holding.model_changed)
        sources, keys = self._sources(client, directory)
        tenancy = Tenancy(keys, loop.time, self._identities, self._shared)
        gateway = Gateway(client, directory, holding, tenancy, requests)
        on_loopback = is_loopback(self._listener.getsockname()[0])

        def problem() -> str:
            return self._problem(directory, keys)

        if options.endpoint_picker_port is not None:
            self._add_picker(gateway, sources, problem)
        app = create_gateway(gateway, options.access, problem, on_loopback=on_loopback)
        shutdown_seconds = math.ceil(options.drain_timeout) + _ABORT_SECONDS
        api = HttpServer(app, self._listener, shutdown_seconds, requests)
        control = HttpServer(
            create_control(holding, problem, metrics_page(gateway).__call__), self._control_listener, 1
        )
        self._servers = [api, control]
        # What exists now stays: without it, a collection of garbage takes no noticeable time.
        gc.collect()
        gc.freeze()
        tasks = [asyncio.create_task(source.run()) for source in sources]
        tasks.append(asyncio.create_task(watch(requests, _PING_SECONDS)))
        for task in tasks:
            task.add_done_callback(self._on_task_end)
        side = asyncio.create_task(control.run_on_port())
        try:
            if self._picker is not None:
                host, port = self._listener.getsockname()[0], options.endpoint_picker_port or 0
                await self._picker.start(host, port, plaintext=options.endpoint_picker_plaintext)
            await api.run_on_port(on_ready)
        finally:
            if self._picker is not None:
                if not self._stops:
                    self._stop_picker(0.0)
                await asyncio.gather(*self._stops, return_exceptions=True)
            control.should_exit = True
            await side
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
            if requests.tracer is not None:
                await asyncio.to_thread(requests.tracer.close)
            self._loop = None
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def _sources(self, client: Client, directory: Directory) -> tuple[list[Source], Keys | None]:
        """Return the sources of models, keys, those of an identity provider and shared counts; and the keys again."""
        sources: list[Source] = []
        keys: Keys | None = self._file_keys
        api_server = None if self._access is None else Client(_CONNECT_SECONDS, self._access.tls())
        if self._backends:
            sources.append(Backends(client, self._backends, directory))
        else:
            assert self._access is not None and api_server is not None
            sources.append(ClusterModels(api_server, self._access, self._options.namespaces, directory))
        if self._options.key_secrets:
            assert self._access is not None and api_server is not None
            keys = secrets = SecretKeys(api_server, self._access, by_tokens=self._identities is not None)
            sources.append(secrets)
        if self._identities is not None:
            sources.append(self._identities.provider)
        if self._shared is not None:
            sources.append(self._shared)
        return sources, keys

    def _add_picker(self, gateway: Gateway, sources: list[Source], problem: Callable[[], str]) -> None:
        """Make the endpoint picker, and add its source. `problem` returns why it is not ready; empty: it is."""
        # gRPC takes a while to load.
        from minisgl.gateway.endpoint_picker.picker import Picker
        from minisgl.gateway.endpoint_picker.picks import MAX_ENDPOINTS, Picks
        from minisgl.gateway.endpoint_picker.server import PickerServer

        picks = Picks(1 if self._options.endpoint_picker_single else MAX_ENDPOINTS)
        if self._backends:
            picker = Picker(gateway, picks, of_backends, everything)
            gateway.directory.on_change(lambda key: picker.endpoints_changed())
        else:
            assert self._access is not None
            api_server = Client(_CONNECT_SECONDS, self._access.tls())
            self._endpoints = endpoints = ClusterEndpoints(api_server, self._access)
            picker = Picker(gateway, picks, endpoints.of, endpoints.serves)
            endpoints.on_change(picker.endpoints_changed)
            sources.append(endpoints)
        self._picker = PickerServer(picker, problem)

    def _stop_picker(self, seconds: float) -> None:
        if self._picker is not None:
            self._stops.append(asyncio.create_task(self._picker.stop(seconds)))

    def _problem(self, directory: Directory, keys: Keys | None) -> str:
        """Return why the gateway is not ready; empty: it is."""
        if self._stopping:
            return "the gateway is shutting down"
        if isinstance(keys, SecretKeys) and not keys.is_listed:
            return "the Secrets with keys have not been listed yet"
        if self._endpoints is not None and self._endpoints.problem:
            return self._endpoints.problem
        return directory.problem

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Stop when a task has failed, which is a fault of the gateway: it must not serve an old table for ever."""
        if not task.cancelled() and not self._stopping:
            self._on_signal()

    def _on_signal(self) -> None:
        if self._stopping:
            self._fail_held()
            self._stop_picker(0.0)
            for server in self._servers:
                server.should_exit = server.force_exit = True
            return
        self._stopping = True
        assert self._loop is not None
        self._loop.call_later(0 if self._backends else LEAVE_SECONDS, self._stop_listening)

    def _stop_listening(self) -> None:
        self._servers[0].should_exit = True
        # Requests that wait are refused before their streams are ended.
        self._stop_picker(self._options.drain_timeout + _ABORT_SECONDS)
        assert self._loop is not None
        # The model of a request that waits may still start in time.
        self._loop.call_later(self._options.drain_timeout, self._fail_held)

    def _fail_held(self) -> None:
        assert self._holding is not None
        self._holding.refuse(ApiError.from_code("shutting_down", "the gateway is shutting down; retry"))


def _identities(options: GatewayOptions) -> Identities | None:
    """Return the tenants by access tokens; None: only keys count. Raises ProviderError."""
    oidc = options.oidc
    if not oidc.issuer:
        if oidc.audiences or oidc.jwks_url is not None:
            raise ProviderError("--oidc-audience and --oidc-jwks-url need --oidc-issuer URL; add it")
        return None
    if not oidc.audiences:
        raise ProviderError("--oidc-issuer needs --oidc-audience LIST: otherwise tokens for other services would do")
    if options.keys is None and not options.key_secrets:
        message = "--oidc-issuer needs the tenants that its tokens name; write them with --keys or --key-secrets"
        raise ProviderError(message)
    return Identities(Provider(oidc), TokenRules(oidc.issuer, oidc.audiences, oidc.tenant_claim))
