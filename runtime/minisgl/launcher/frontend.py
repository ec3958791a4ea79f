"""`frontend`: the processes of a frontend pod, which finds its engines by name. It has no model files and no device."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from minisgl.launcher.endpoint import EndpointOptions, endpoint_groups, run_endpoint
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.restarts import Limits
from minisgl.options import Port, Seconds, option
from minisgl.router.config import EngineDiscovery
from minisgl.wire.peer_secret import SECRET_DIRECTORY, SecretDirectory
from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT

logger = logging.getLogger(__name__)

_LIMITS: Final = Limits(max_restarts=5, restart_window=600.0, startup_timeout=120.0)
"""Nothing is loaded at the start. The cluster restarts a frontend that keeps dying, with growing delays."""


class FrontendOptions(EndpointOptions, frozen=True, kw_only=True):
    """Options of `minisgl frontend`."""

    engines: str
    """Host name that resolves to the addresses of the engines."""
    names: tuple[str, ...]
    """Names of the model in the API; empty: the engines' name for it."""
    scheduler_port: Annotated[Port, option("TCP port of the engines' schedulers")] = SCHEDULER_PORT
    engine_control_port: Annotated[Port, option("TCP port from which engines serve tokenizer files")] = CONTROL_PORT
    control_port: Annotated[Port, option("TCP port of /live, /ready, /status and /drain, 0 for a free one")] = (
        CONTROL_PORT
    )
    peer_secret: SecretDirectory = SECRET_DIRECTORY
    leave_timeout: Annotated[
        Seconds,
        option(
            "time after SIGTERM in which the server is not ready but accepts requests, so that load balancers notice",
            default="{:g} seconds",
        ),
    ] = 15.0


def serve_frontend(options: FrontendOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises LauncherError; no process is left running."""
    run_endpoint(
        options,
        partial(groups, options),
        limits=_LIMITS,
        drain_timeout=options.leave_timeout + options.drain_timeout,
        on_ready=lambda address: logger.info("frontend for %s at %s/v1", options.engines, address),
    )


def groups(options: FrontendOptions, directory: Path, listener: int) -> list[GroupSpec]:
    """Return the groups of tokenizers, and of a frontend that listens on the descriptor `listener`. Sockets and
    tokenizer files are in `directory`."""
    engines = EngineDiscovery(
        host=options.engines,
        scheduler_port=options.scheduler_port,
        control_port=options.engine_control_port,
        cache=str(directory / "tokenizer-files"),
    )
    return endpoint_groups(
        options,
        engines,
        options.names,
        directory,
        listener,
        peer_secret=options.peer_secret,
        leave_seconds=options.leave_timeout,
        control_port=options.control_port,
        ready_before_engine=True,
    )
