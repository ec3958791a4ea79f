"""Frontend and tokenizer processes with their options, shared by `serve` and by frontend pods."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from minisgl import logging as log
from minisgl.frontend.config import Access, FrontendConfig, RequestLimits, TraceOptions
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.listener import bind
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.restarts import Limits
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor
from minisgl.logging import LogOptions
from minisgl.options import Port, Seconds, option
from minisgl.parsing.names import Parsers
from minisgl.router.config import EngineDiscovery, LocalEngine, TokenizerConfig
from minisgl.wire.sockets import url_host
from minisgl.wire.status import HTTP_PORT

logger = logging.getLogger(__name__)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the HTTP API, and its tokenizer processes."""

    host: Annotated[str, option("address to listen on; :: for all IPv6 and IPv4 ones", metavar="ADDR")] = "127.0.0.1"
    port: Annotated[Port, option("TCP port, 0 for a free one")] = HTTP_PORT
    tokenizers: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        option("number of tokenizer workers, each one process; 0: a thread of the API process", default="{} process"),
    ] = 1


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every command that serves the HTTP API."""

    endpoint: Endpoint = Endpoint()
    access: Access = Access()
    limits: RequestLimits = RequestLimits()
    traces: TraceOptions = TraceOptions()
    parsers: Parsers = Parsers()
    drain_timeout: Annotated[
        Seconds,
        option("time for running requests to finish after SIGTERM; a second signal stops them", default="{:g} seconds"),
    ]
    log: LogOptions = LogOptions()


def run_endpoint(
    options: EndpointOptions,
    groups: Callable[[Path, int], Sequence[GroupSpec]],
    *,
    limits: Limits,
    drain_timeout: float,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Raises LauncherError; no process is left running.

    `groups` gets the directory of sockets and the descriptor of the listening socket; `on_ready` gets the URL."""
    host, port = options.endpoint.host, options.endpoint.port
    with run_directory() as directory, contextlib.closing(bind(host, port)) as listener:
        address = f"http://{url_host(listener.getsockname()[0])}:{listener.getsockname()[1]}"
        Supervisor(
            groups(directory, listener.fileno()),
            limits=limits,
            drain_timeout=drain_timeout,
            log_level=options.log.level,
            on_line=log.writer(options.log.format),
            on_ready=partial(on_ready, address),
            # The launcher holds the socket too, so that clients of a frontend that died wait there. At the end only the
            # frontend decides how long it listens: no client must be left waiting at the launcher's.
            on_end=listener.close,
        ).run()
    logger.info("stopped")


def endpoint_groups(
    options: EndpointOptions,
    engines: LocalEngine | EngineDiscovery,
    names: tuple[str, ...],
    directory: Path,
    listener: int,
    *,
    peer_secret: str = "",
    **frontend: Any,
) -> list[GroupSpec]:
    """Return a group for each tokenizer, and one for a frontend that listens on the descriptor `listener`. Sockets are
    in `directory`, under the same names at every start: a restarted process is found by its peers. `frontend` are
    further fields of its configuration."""
    tokenizers = [
        TokenizerConfig(
            engines=engines,
            names=names,
            parsers=options.parsers,
            queue_seconds=options.limits.queue_seconds,
            stall_seconds=options.limits.stall_seconds,
            continues=options.limits.continues,
            # In a cluster, engines and frontends of a model have the same.
            drain_seconds=options.drain_timeout,
            peer_secret=peer_secret,
            frontend_address=f"ipc://{directory}/tokenizer{number}",
            name=f"tokenizer{number}",
        )
        for number in range(max(options.endpoint.tokenizers, 1))
    ]
    lost_lines = log.lost_lines.share()
    config = FrontendConfig(
        socket_fd=listener,
        lost_lines_fd=lost_lines,
        peer_secret=peer_secret,
        tokenizer_addresses=tuple(tokenizer.frontend_address for tokenizer in tokenizers),
        tokenizer=None if options.endpoint.tokenizers else tokenizers[0],
        drain_seconds=options.drain_timeout,
        # A request may meet an engine that hangs, and then wait for its restart.
        accept_seconds=options.limits.stall_seconds + options.limits.queue_seconds,
        names=names,
        limits=options.limits,
        access=options.access,
        traces=options.traces,
        **frontend,
    )
    specs = [
        ProcessSpec(name=tokenizer.name, target="minisgl.launcher.roles:tokenizer", config=tokenizer)
        for tokenizer in tokenizers
        if options.endpoint.tokenizers
    ]
    specs.append(
        ProcessSpec(
            name="frontend",
            target="minisgl.launcher.roles:frontend",
            config=config,
            descriptors=(listener, lost_lines),
            drains=True,
            preload=("minisgl.frontend.process",),
        )
    )
    return [GroupSpec(name=spec.name, processes=partial(_same, spec)) for spec in specs]


def _same(spec: ProcessSpec, number: int) -> list[ProcessSpec]:
    return [spec]
