"""The processes between clients and engines, and the options that they have with an engine beside them as in a pod of
their own."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from minisgl import logging as log
from minisgl.errors import CodedError
from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.listener import bind, url_host
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.restarts import Limits
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor
from minisgl.router.config import EngineDiscovery, LocalEngine, TokenizerConfig
from minisgl.wire.status import HTTP_PORT

logger = logging.getLogger(__name__)


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every command that serves the HTTP API. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    tokenizers: int = 1
    """Tokenizer processes; 0: a thread of the frontend."""
    limits: RequestLimits = RequestLimits()
    api_keys: str | None = None
    """File with API keys; None: the API needs no key."""
    cors_origins: tuple[str, ...] = ()
    admin_port: int | None = None
    """Port of the administration API; None: there is none."""
    admin_keys: str | None = None
    drain_timeout: float
    log_level: log.LogLevel = "info"
    log_format: log.LogFormat = "auto"


def run_endpoint(
    options: EndpointOptions,
    groups: Callable[[Path, int], Sequence[GroupSpec]],
    *,
    limits: Limits,
    drain_timeout: float,
    check: Callable[[], None] = lambda: None,
    on_ready: Callable[[str], None],
) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code. Errors are logged; no process is left.

    `groups` gets the directory of sockets and the descriptor of the listening socket; `on_ready` gets the URL. `check`
    runs before any process starts, and may raise an error with a code."""
    log.set_up("launcher", options.log_level, options.log_format)
    renderer = log.Renderer(options.log_format, sys.stderr)

    def on_line(line: log.Line) -> None:
        print(renderer.render(line), file=sys.stderr, flush=True)

    try:
        check()
        with run_directory() as directory, contextlib.closing(bind(options.host, options.port)) as listener:
            address = f"http://{url_host(listener)}:{listener.getsockname()[1]}"
            Supervisor(
                groups(directory, listener.fileno()),
                limits=limits,
                drain_timeout=drain_timeout,
                log_level=options.log_level,
                on_line=on_line,
                on_ready=partial(on_ready, address),
                # The launcher holds the socket too, so that clients of a frontend that died wait there. At the end only
                # the frontend decides how long it listens: no client must be left waiting at the launcher's.
                on_end=listener.close,
            ).run()
    except CodedError as error:
        logger.error("%s", error, extra={"code": error.code})
        return 1
    logger.info("stopped")
    return 0


def endpoint_groups(
    options: EndpointOptions,
    engines: LocalEngine | EngineDiscovery,
    names: tuple[str, ...],
    directory: Path,
    listener: int,
    **frontend: Any,
) -> list[GroupSpec]:
    """Return a group for each tokenizer, and one for a frontend that listens on the descriptor `listener`. Sockets are
    in `directory`, under the same names at every start: a restarted process is found by its peers. `frontend` are
    further fields of its configuration."""
    tokenizers = [
        TokenizerConfig(
            engines=engines,
            names=names,
            queue_seconds=options.limits.queue_seconds,
            stall_seconds=options.limits.stall_seconds,
            frontend_address=f"ipc://{directory}/tokenizer{number}",
            name=f"tokenizer{number}",
        )
        for number in range(max(options.tokenizers, 1))
    ]
    config = FrontendConfig(
        socket_fd=listener,
        tokenizer_addresses=tuple(tokenizer.frontend_address for tokenizer in tokenizers),
        tokenizer=None if options.tokenizers else tokenizers[0],
        drain_seconds=options.drain_timeout,
        limits=options.limits,
        api_keys=options.api_keys,
        cors_origins=options.cors_origins,
        admin_port=options.admin_port,
        admin_keys=options.admin_keys,
        **frontend,
    )
    specs = [
        ProcessSpec(name=tokenizer.name, target="minisgl.launcher.roles:tokenizer", config=tokenizer)
        for tokenizer in tokenizers
        if options.tokenizers
    ]
    specs.append(
        ProcessSpec(
            name="frontend",
            target="minisgl.launcher.roles:frontend",
            config=config,
            descriptors=(listener,),
            drains=True,
            preload=("minisgl.frontend.process",),
        )
    )
    return [GroupSpec(name=spec.name, processes=partial(_same, spec)) for spec in specs]


def _same(spec: ProcessSpec, number: int) -> list[ProcessSpec]:
    return [spec]
