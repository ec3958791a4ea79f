"""The ranks of a tensor-parallel group on this machine: how they find each other, and what each of them is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from minisgl.config import EngineConfig
from minisgl.engine.interface import Engine
from minisgl.launcher.devices import open_device, rank_environment
from minisgl.launcher.process import ProcessSpec

logger = logging.getLogger(__name__)

PRELOAD: Final = ("minisgl.engine.engine",)
"""What takes a rank's process seconds to import: torch, above all. None of it touches a device."""


class WorkerRankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank above 0 needs to know."""

    engine: EngineConfig
    plans: str
    """Address on which it takes rank 0's plans."""


def rank0_config(engine: EngineConfig, directory: Path, start: int = 1) -> EngineConfig:
    """`engine` with a place in the run directory where its ranks meet: unlike a port, nobody else can take it. Each
    start has its own: what killed ranks have left at theirs would confuse the next."""
    return msgspec.structs.replace(engine, rank=0, rendezvous=f"file://{directory}/rendezvous{start}")


def worker_rank_configs(rank0: EngineConfig, directory: Path) -> list[WorkerRankConfig]:
    """One for each of ranks 1, 2, …"""
    return [
        WorkerRankConfig(engine=msgspec.structs.replace(rank0, rank=rank), plans=f"ipc://{directory}/plans{rank}")
        for rank in range(1, rank0.tensor_parallel)
    ]


def worker_rank_spec(config: WorkerRankConfig) -> ProcessSpec:
    engine = config.engine
    return ProcessSpec(
        name=f"rank{engine.rank}",
        target="minisgl.launcher.roles:follower",
        config=config,
        environment=rank_environment(engine.device, engine.tensor_parallel),
        preload=PRELOAD,
    )


def start_engine(config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> Engine:
    """Any rank's engine. Raises what `create_engine` raises."""
    began = time.monotonic()
    if config.device == "cuda":
        open_device(config.rank if config.device_index is None else config.device_index)
    from minisgl.engine.engine import create_engine

    imports = time.monotonic() - began
    engine = create_engine(config, progress)
    phases = engine.stats.start_seconds = {"imports": imports, **engine.stats.start_seconds}
    logger.info(
        "the engine is up after %.1f s",
        sum(phases.values()),
        extra={phase: round(seconds, 2) for phase, seconds in phases.items()},
    )
    return engine


def start_rank0(
    config: EngineConfig, plans: Sequence[str], progress: Callable[[str, float], None] | None = None
) -> Engine:
    """Rank 0's engine; `plans` are the addresses of its followers. Raises what `create_engine` raises."""
    engine = start_engine(config, progress)
    if not plans:
        return engine
    import zmq

    from minisgl.engine.broadcast import PlanBroadcast, TensorParallelEngine

    return TensorParallelEngine(engine, PlanBroadcast(zmq.Context.instance(), plans))
