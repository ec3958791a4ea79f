"""Process specs of the ranks of one machine or pod. Pure: callers differ only in addresses and devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from minisgl.config import EngineConfig
from minisgl.launcher.devices import rank_environment
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.ranks import WorkerRankConfig
from minisgl.scheduler.process import SchedulerProcessConfig

_PRELOAD: Final = ("minisgl.engine.engine",)
"""Imports that take seconds, torch above all. None of them touches a device."""


def file_rendezvous(directory: Path, start: int = 1) -> str:
    """Rendezvous of ranks on one machine; unlike a port, no other program can take it. Each start has its own file:
    leftovers of killed ranks would confuse the next ones."""
    return f"file://{directory}/rendezvous{start}"


def ipc_plans(directory: Path, ranks: range) -> dict[int, str]:
    """Rank → address of its step plans, for the worker ranks in `ranks`."""
    return {rank: f"ipc://{directory}/plans{rank}" for rank in ranks if rank}


def prepared_specs(engine: EngineConfig, ranks: range, *, alone: bool) -> list[ProcessSpec]:
    """Specs of `ranks`, all those of the group that run on one machine or pod, without their work: of those whose
    standby does its imports before the first start. `alone`: these are all ranks of the group.

    A single machine's ranks open their GPUs while they import, which no standby can do for them."""
    return [] if alone and engine.device == "cuda" else workless_specs(engine, ranks)


def workless_specs(engine: EngineConfig, ranks: range) -> list[ProcessSpec]:
    """Specs of `ranks` without their work."""
    environment = rank_environment(engine.device, len(ranks))
    several_pods_with_devices = engine.device == "cuda" and len(ranks) < engine.tensor_parallel
    return [
        ProcessSpec(
            name=f"rank{rank}",
            target=f"minisgl.launcher.roles:{'worker_rank' if rank else 'rank0'}",
            config=None,
            environment=environment,
            preload=_PRELOAD,
            # CUDA IPC between containers fails where both processes have the same id.
            pid_residue=(rank, engine.tensor_parallel) if several_pods_with_devices else (0, 1),
        )
        for rank in ranks
    ]


def rank_specs(
    engine: EngineConfig,
    ranks: range,
    plans: Mapping[int, str],
    scheduler: SchedulerProcessConfig | None = None,
    *,
    first_device: int | None = None,
    plans_token: str = "",
) -> list[ProcessSpec]:
    """Specs of `ranks`, all those of the group that run on one machine or pod.

    engine: configuration of every rank, with the rendezvous of this start; rank and device are filled in.
    plans: rank → address on which it receives step plans, for each worker rank in `ranks`.
    scheduler: configuration of rank 0; None: rank 0 runs in the caller's process, and gets no spec.
    first_device: index of the CUDA device of the first of `ranks`, the others follow; None: the rank's number.
    plans_token: of worker ranks whose addresses others than rank 0 can reach, see `PlanReceiver`.
    """
    specs = []
    for rank, spec in zip(ranks, workless_specs(engine, ranks), strict=True):
        device_index = None if first_device is None else first_device + rank - ranks.start
        own = msgspec.structs.replace(engine, rank=rank, device_index=device_index)
        config: WorkerRankConfig | SchedulerProcessConfig
        if rank:
            config = WorkerRankConfig(engine=own, plans=plans[rank], token=plans_token)
        elif scheduler is not None:
            config = msgspec.structs.replace(scheduler, engine=own)
        else:
            continue
        drains = isinstance(config, SchedulerProcessConfig) and config.drains
        specs.append(msgspec.structs.replace(spec, config=config, drains=drains))
    return specs
