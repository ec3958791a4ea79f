"""`serve`: the processes of a server on one machine, and the addresses at which they find each other."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from minisgl.config import EngineConfig
from minisgl.launcher.devices import device_memory
from minisgl.launcher.endpoint import EndpointOptions, endpoint_groups, run_endpoint
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.rank_specs import file_rendezvous, ipc_plans, prepared_specs, rank_specs
from minisgl.launcher.restarts import Limits
from minisgl.models.config import ModelConfig
from minisgl.models.fit import check_fit
from minisgl.options import option
from minisgl.router.config import LocalEngine
from minisgl.scheduler.process import SchedulerProcessConfig
from minisgl.tokenizer.file_hashes import hash_tokenizer_files

logger = logging.getLogger(__name__)


class ServeOptions(EndpointOptions, frozen=True, kw_only=True):
    """Options of `minisgl serve`."""

    engine: EngineConfig
    model_name: str
    other_names: tuple[str, ...] = ()
    """Further names that requests may use for the model."""
    revision: Annotated[str | None, option("branch, tag or commit on the Hub", default="main", metavar="REV")] = None
    restarts: Limits


def serve(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises LauncherError and ModelError; no process is left running."""
    # Find errors in config.json and options that cannot fit before a process starts.
    engine = options.engine
    model = ModelConfig.read(engine.model, engine.hf_overrides, engine.quantization)
    check_fit(model, engine, device_memory(engine.device, engine.tensor_parallel))
    began = time.monotonic()

    def on_ready(address: str) -> None:
        extra = {"seconds": round(time.monotonic() - began, 1)}
        logger.info("serving %s at %s/v1, Ctrl-C stops it", options.model_name, address, extra=extra)

    run_endpoint(
        options,
        partial(groups, options),
        limits=options.restarts,
        drain_timeout=options.drain_timeout,
        on_ready=on_ready,
    )


def groups(options: ServeOptions, directory: Path, listener: int) -> list[GroupSpec]:
    """Return the groups of an engine, tokenizers, and a frontend that listens on the descriptor `listener`."""
    engine = LocalEngine(scheduler_address=f"ipc://{directory}/scheduler", model=options.engine.model)
    names = (options.model_name, *options.other_names)
    return [
        _engine_group(options, directory, engine.scheduler_address),
        *endpoint_groups(options, engine, names, directory, listener),
    ]


def _engine_group(options: ServeOptions, directory: Path, scheduler_address: str) -> GroupSpec:
    """Return the group of all ranks: without one of them the others would wait in a collective."""
    boot_ms = time.time_ns() // 1_000_000
    tokenizer_hashes = hash_tokenizer_files(options.engine.model)

    ranks = range(options.engine.tensor_parallel)
    plans = ipc_plans(directory, ranks)

    def processes(number: int) -> list[ProcessSpec]:
        engine = msgspec.structs.replace(options.engine, rendezvous=file_rendezvous(directory, number))
        scheduler = SchedulerProcessConfig(
            engine=engine,
            address=scheduler_address,
            plan_addresses=tuple(plans.values()),
            model_name=options.model_name,
            tokenizer_hashes=tokenizer_hashes,
            epoch=(boot_ms, number),
            max_waiting=options.limits.waiting,
        )
        return rank_specs(engine, ranks, plans, scheduler)

    return GroupSpec(
        name="engine",
        processes=processes,
        prepared=prepared_specs(options.engine, ranks, alone=True),
        required=True,
        stall_seconds=options.limits.stall_seconds,
    )
