"""`serve`: which processes a server on one machine is made of, and how they are told of each other."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path

import msgspec

from minisgl import logging as log
from minisgl.config import EngineConfig
from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.launcher.endpoint import endpoint_groups
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.listener import bind, url_host
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.rank_specs import file_rendezvous, ipc_plans, rank_specs
from minisgl.launcher.restarts import Limits
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.supervisor import Supervisor
from minisgl.models.config import ModelConfig
from minisgl.models.errors import ModelError
from minisgl.router.config import TokenizerConfig
from minisgl.scheduler.process import SchedulerProcessConfig
from minisgl.tokenizer.model_files import hash_tokenizer_files
from minisgl.wire.status import HTTP_PORT

logger = logging.getLogger(__name__)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `minisgl serve` was asked for."""

    engine: EngineConfig
    model_name: str
    other_names: tuple[str, ...] = ()
    """By which requests may call the model too."""
    revision: str = ""
    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    tokenizers: int = 1
    """Processes; 0: in the frontend's."""
    limits: RequestLimits = RequestLimits()
    api_keys: str | None = None
    """File; None: everybody may use the API."""
    cors_origins: tuple[str, ...] = ()
    admin_port: int | None = None
    """None: no administration."""
    admin_keys: str | None = None
    startup_timeout: float
    """Seconds."""
    drain_timeout: float
    """Seconds."""
    max_restarts: int = 3
    """Restarts of processes that died, within `restart_window`, before everything ends; 0: the first death ends it."""
    restart_window: float = 600.0
    """Seconds."""
    log_level: log.LogLevel = "info"
    log_format: log.LogFormat = "auto"


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. What went wrong is logged. Nothing is left running."""
    log.set_up("launcher", options.log_level, options.log_format)
    try:
        # Before any process starts: what one look at config.json tells should not take a rank's start to find out.
        ModelConfig.read(options.engine.model).check_tensor_parallel(options.engine.tensor_parallel)
        _serve(options)
    except (LauncherError, ModelError) as error:
        logger.error("%s", error, extra={"code": error.code})
        return 1
    logger.info("stopped")
    return 0


def _serve(options: ServeOptions) -> None:
    renderer = log.Renderer(options.log_format, sys.stderr)
    began = time.monotonic()
    with run_directory() as directory, contextlib.closing(bind(options.host, options.port)) as listener:
        address = f"http://{url_host(listener)}:{listener.getsockname()[1]}"

        def on_line(line: log.Line) -> None:
            print(renderer.render(line), file=sys.stderr, flush=True)

        def on_ready() -> None:
            logger.info(
                "serving %s at %s/v1, Ctrl-C stops it",
                options.model_name,
                address,
                extra={"seconds": round(time.monotonic() - began, 1)},
            )

        supervisor = Supervisor(
            groups(options, directory, listener.fileno()),
            limits=Limits(
                max_restarts=options.max_restarts,
                restart_window=options.restart_window,
                startup_timeout=options.startup_timeout,
            ),
            drain_timeout=options.drain_timeout,
            log_level=options.log_level,
            on_line=on_line,
            on_ready=on_ready,
            # We hold the socket too, so that a frontend that died finds its clients waiting there. At the end it alone
            # decides how long it listens: nobody may be left waiting at ours.
            on_end=listener.close,
        )
        supervisor.run()


def groups(options: ServeOptions, directory: Path, listener: int) -> list[GroupSpec]:
    """An engine, tokenizers and a frontend that listens on the descriptor `listener`. Sockets go to `directory`,
    under the same names at every start: a peer finds by itself what was started again."""
    scheduler_address = f"ipc://{directory}/scheduler"
    tokenizers = [
        TokenizerConfig(
            model=options.engine.model,
            scheduler_address=scheduler_address,
            frontend_address=f"ipc://{directory}/tokenizer{number}",
            name=f"tokenizer{number}",
            names=(options.model_name, *options.other_names) if options.other_names else (),
        )
        for number in range(max(options.tokenizers, 1))
    ]
    frontend = FrontendConfig(
        socket_fd=listener,
        tokenizer_addresses=tuple(tokenizer.frontend_address for tokenizer in tokenizers),
        tokenizer=None if options.tokenizers else tokenizers[0],
        drain_seconds=options.drain_timeout,
        limits=options.limits,
        api_keys=options.api_keys,
        cors_origins=options.cors_origins,
        admin_port=options.admin_port,
        admin_keys=options.admin_keys,
    )
    return [_engine_group(options, directory, scheduler_address), *endpoint_groups(frontend, tokenizers)]


def _engine_group(options: ServeOptions, directory: Path, scheduler_address: str) -> GroupSpec:
    """All ranks: one that is gone leaves the others waiting in a collective, with requests half done."""
    boot_ms = time.time_ns() // 1_000_000
    tokenizer_hashes = hash_tokenizer_files(options.engine.model)

    ranks = range(options.engine.tensor_parallel)
    plans = ipc_plans(directory, ranks)

    def processes(number: int) -> list[ProcessSpec]:
        engine = msgspec.structs.replace(options.engine, rendezvous=file_rendezvous(directory, number))
        scheduler = SchedulerProcessConfig(
            engine=engine,
            address=scheduler_address,
            followers=tuple(plans.values()),
            model_name=options.model_name,
            revision=options.revision,
            tokenizer_hashes=tokenizer_hashes,
            epoch=(boot_ms, number),
            max_waiting=options.limits.waiting,
        )
        return rank_specs(engine, ranks, plans, scheduler)

    return GroupSpec(name="engine", processes=processes)
