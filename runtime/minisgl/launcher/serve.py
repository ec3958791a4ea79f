"""`serve`: which processes a server on one machine is made of, and how they are told of each other."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from minisgl import logging as log
from minisgl.config import CacheKind, EngineConfig
from minisgl.frontend.config import FrontendConfig
from minisgl.launcher.devices import rank_environment
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.ranks import follower_configs, follower_spec, rank0_config
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor
from minisgl.scheduler.process import SchedulerProcessConfig
from minisgl.tokenizer.config import TokenizerConfig
from minisgl.tokenizer.model_files import hash_tokenizer_files

logger = logging.getLogger(__name__)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `minisgl serve` was asked for."""

    engine: EngineConfig
    model_name: str
    revision: str = ""
    cache: CacheKind = "radix"
    overlap: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizers: int = 1
    """Processes; 0: in the frontend's."""
    startup_timeout: float
    """Seconds."""
    drain_timeout: float
    """Seconds."""
    log_level: log.LogLevel = "info"
    log_format: log.LogFormat = "auto"


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. What went wrong is logged. Nothing is left running."""
    log.set_up("launcher", options.log_level, options.log_format)
    try:
        _serve(options)
    except LauncherError as error:
        logger.error("%s", error, extra={"code": error.code})
        return 1
    logger.info("stopped")
    return 0


def _serve(options: ServeOptions) -> None:
    renderer = log.Renderer(options.log_format, sys.stderr)
    began = time.monotonic()
    with run_directory() as directory, contextlib.closing(_bind(options.host, options.port)) as listener:
        address = f"http://{_url_host(listener)}:{listener.getsockname()[1]}"

        def on_line(line: log.Line) -> None:
            print(renderer.render(line), file=sys.stderr, flush=True)

        def on_ready() -> None:
            # The frontend alone listens: when it closes the socket to drain, nobody may be left waiting at ours.
            listener.close()
            logger.info(
                "serving %s at %s/v1, Ctrl-C stops it",
                options.model_name,
                address,
                extra={"seconds": round(time.monotonic() - began, 1)},
            )

        supervisor = Supervisor(
            process_specs(options, directory, listener.fileno()),
            startup_timeout=options.startup_timeout,
            drain_timeout=options.drain_timeout,
            log_level=options.log_level,
            on_line=on_line,
            on_ready=on_ready,
        )
        supervisor.run()


def process_specs(options: ServeOptions, directory: Path, listener: int) -> list[ProcessSpec]:
    """Ranks, tokenizers and a frontend that listens on the descriptor `listener`; sockets go to `directory`."""
    engine = rank0_config(options.engine, directory)
    followers = follower_configs(engine, directory)
    scheduler = SchedulerProcessConfig(
        engine=engine,
        address=f"ipc://{directory}/scheduler",
        followers=tuple(follower.plans for follower in followers),
        model_name=options.model_name,
        revision=options.revision,
        tokenizer_hashes=hash_tokenizer_files(engine.model),
        epoch=(time.time_ns() // 1_000_000, 0),
        overlap=options.overlap,
        cache=options.cache,
    )
    tokenizers = [
        TokenizerConfig(
            model=engine.model,
            scheduler_address=scheduler.address,
            frontend_address=f"ipc://{directory}/tokenizer{number}",
            name=f"tokenizer{number}",
        )
        for number in range(max(options.tokenizers, 1))
    ]
    frontend = FrontendConfig(
        socket_fd=listener,
        tokenizer_addresses=tuple(tokenizer.frontend_address for tokenizer in tokenizers),
        tokenizer=None if options.tokenizers else tokenizers[0],
        drain_seconds=options.drain_timeout,
    )
    on_rank = rank_environment(engine.device, engine.tensor_parallel)
    return [
        ProcessSpec(name="rank0", target=_role("rank0"), config=scheduler, environment=on_rank),
        *map(follower_spec, followers),
        *(
            ProcessSpec(name=tokenizer.name, target=_role("tokenizer"), config=tokenizer)
            for tokenizer in tokenizers[: options.tokenizers]
        ),
        ProcessSpec(name="frontend", target=_role("frontend"), config=frontend, descriptors=(listener,), drains=True),
    ]


def _role(name: str) -> str:
    return f"minisgl.launcher.roles:{name}"


def _bind(host: str, port: int) -> socket.socket:
    """Taken before minutes of loading, so that a port in use is known at once. Nobody listens yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise LauncherError(
            "address_unavailable",
            f"cannot listen on {host} port {port}: {reason}. Choose another with --host or --port (0: a free one)",
        ) from error
    return listener


def _url_host(listener: socket.socket) -> str:
    host: str = listener.getsockname()[0]
    return f"[{host}]" if listener.family == socket.AF_INET6 else host
