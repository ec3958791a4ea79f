"""`frontend`: the processes of a frontend pod, which finds its engines by name. It has no model files and no device."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Final

import msgspec

from minisgl import logging as log
from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.launcher.endpoint import endpoint_groups
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.listener import bind, url_host
from minisgl.launcher.restarts import Limits
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor
from minisgl.router.config import EngineDiscovery, TokenizerConfig

logger = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""From the signal to the end of new requests: so long it may take until nobody in the cluster sends any."""

_LIMITS: Final = Limits(max_restarts=5, restart_window=600.0, startup_timeout=120.0)
"""Nothing is loaded at the start. A frontend that keeps on dying is the cluster's to start again, more and more
slowly."""


class FrontendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `minisgl frontend` was asked for. Times in seconds."""

    engines: str
    """Name whose addresses are those of the engines."""
    scheduler_port: int
    engine_control_port: int
    names: tuple[str, ...]
    host: str
    port: int
    control_port: int
    tokenizers: int
    """Processes; 0: in the frontend's."""
    limits: RequestLimits
    api_keys: str | None
    """File; None: everybody may use the API."""
    cors_origins: tuple[str, ...]
    admin_port: int | None
    """None: no administration."""
    admin_keys: str | None
    drain_timeout: float
    log_level: log.LogLevel
    log_format: log.LogFormat


def serve_frontend(options: FrontendOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. What went wrong is logged. Nothing is left running."""
    log.set_up("launcher", options.log_level, options.log_format)
    renderer = log.Renderer(options.log_format, sys.stderr)

    def on_line(line: log.Line) -> None:
        print(renderer.render(line), file=sys.stderr, flush=True)

    try:
        with run_directory() as directory, contextlib.closing(bind(options.host, options.port)) as listener:
            address = f"http://{url_host(listener)}:{listener.getsockname()[1]}"
            Supervisor(
                groups(options, directory, listener.fileno()),
                limits=_LIMITS,
                drain_timeout=LEAVE_SECONDS + options.drain_timeout,
                log_level=options.log_level,
                on_line=on_line,
                on_ready=lambda: logger.info("frontend for %s at %s/v1", options.engines, address),
                on_end=listener.close,
            ).run()
    except LauncherError as error:
        logger.error("%s", error, extra={"code": error.code})
        return 1
    logger.info("stopped")
    return 0


def groups(options: FrontendOptions, directory: Path, listener: int) -> list[GroupSpec]:
    """Tokenizers, and a frontend that listens on the descriptor `listener`. Sockets and tokenizer files go to
    `directory`."""
    engines = EngineDiscovery(
        host=options.engines,
        scheduler_port=options.scheduler_port,
        control_port=options.engine_control_port,
        cache=str(directory / "tokenizer-files"),
        retry_seconds=options.limits.queue_seconds,
        stall_seconds=options.limits.stall_seconds,
        names=options.names,
    )
    tokenizers = [
        TokenizerConfig(engines=engines, frontend_address=f"ipc://{directory}/tokenizer{n}", name=f"tokenizer{n}")
        for n in range(max(options.tokenizers, 1))
    ]
    frontend = FrontendConfig(
        socket_fd=listener,
        tokenizer_addresses=tuple(tokenizer.frontend_address for tokenizer in tokenizers),
        tokenizer=None if options.tokenizers else tokenizers[0],
        leave_seconds=LEAVE_SECONDS,
        drain_seconds=options.drain_timeout,
        limits=options.limits,
        api_keys=options.api_keys,
        cors_origins=options.cors_origins,
        control_port=options.control_port,
        admin_port=options.admin_port,
        admin_keys=options.admin_keys,
    )
    return endpoint_groups(frontend, tokenizers)
