"""From one start of a replica to the next: what each pod's ranks are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl.config import EngineConfig
from minisgl.launcher.devices import rank_environment
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.ranks import PRELOAD, WorkerRankConfig
from minisgl.replica.link import Begin, Epoch, bracketed
from minisgl.replica.options import EngineOptions
from minisgl.replica.topology import Place, are_neighbours, first_devices
from minisgl.scheduler.process import SchedulerProcessConfig


class OtherPod(msgspec.Struct, frozen=True, kw_only=True):
    """One of pods 1, 2, …, as pod 0 sees it."""

    host: str
    """Its address, from pod 0."""
    leader_host: str
    """Pod 0's address, from there."""
    place: Place


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    begin: list[Begin]
    """For pods 1, 2, …"""
    local: list[ProcessSpec]
    """Ranks of pod 0."""
    neighbours: bool
    """NCCL is told that all pods are on one machine."""


def plan_epoch(
    options: EngineOptions,
    epoch: Epoch,
    *,
    place: Place,
    others: Sequence[OtherPod],
    sockets: Path,
    tokenizer_hashes: dict[str, str],
    try_neighbours: bool,
) -> EpochPlan:
    """`place` is pod 0's; `sockets` is a directory for the sockets inside pod 0."""
    device, tensor_parallel = options.engine.device, options.engine.tensor_parallel
    ranks_per_pod = options.expected.ranks_per_pod
    places = [place, *(other.place for other in others)]
    neighbours = bool(try_neighbours and others) and are_neighbours(places, tensor_parallel)
    if others:
        # Numbers, not names: who could dial pod 0 can reach this too.
        rendezvous = f"tcp://{bracketed(others[0].leader_host)}:{options.ports.rendezvous}"
    else:
        rendezvous = f"file://{sockets}/rendezvous{epoch[1]}"
    firsts = first_devices(places, ranks_per_pod)
    begins = [
        Begin(
            epoch=epoch,
            rendezvous=rendezvous,
            first_device=first if device == "cuda" else None,
            nccl_host=place.node if neighbours else "",
        )
        for first in firsts
    ]
    configs = _rank_configs(options, begins[0])
    local_plans = {rank: f"ipc://{sockets}/plans{rank}" for rank in range(1, ranks_per_pod)}
    other_plans = [
        f"tcp://{bracketed(other.host)}:{options.ports.plans + index * ranks_per_pod + local}"
        for index, other in enumerate(others, 1)
        for local in range(ranks_per_pod)
    ]
    scheduler = SchedulerProcessConfig(
        engine=configs[0],
        address=f"tcp://*:{options.ports.scheduler}",
        followers=(*local_plans.values(), *other_plans),
        model_name=options.model_name,
        replica=options.expected.replica,
        replica_revision=options.expected.revision,
        drains=True,
        tokenizer_hashes=tokenizer_hashes,
        epoch=epoch,
        overlap=options.overlap,
        cache=options.cache,
    )
    rank0 = msgspec.structs.replace(_spec(options, configs[0], "rank0", scheduler), drains=True)
    followers = [
        _spec(options, each, "follower", WorkerRankConfig(engine=each, plans=local_plans[each.rank]))
        for each in configs[1:]
    ]
    return EpochPlan(begin=begins[1:], local=[rank0, *followers], neighbours=neighbours)


def member_pod_ranks(options: EngineOptions, begin: Begin) -> list[ProcessSpec]:
    """The ranks of another pod than pod 0."""
    return [
        _spec(
            options,
            each,
            "follower",
            WorkerRankConfig(engine=each, plans=f"tcp://*:{options.ports.plans + each.rank}"),
        )
        for each in _rank_configs(options, begin)
    ]


def _rank_configs(options: EngineOptions, begin: Begin) -> list[EngineConfig]:
    """Of this pod's ranks."""
    count = options.expected.ranks_per_pod
    return [
        msgspec.structs.replace(
            options.engine,
            rank=options.pod_index * count + local,
            rendezvous=begin.rendezvous,
            device_index=None if begin.first_device is None else begin.first_device + local,
            nccl_host=begin.nccl_host,
        )
        for local in range(count)
    ]


def _spec(
    options: EngineOptions, engine: EngineConfig, role: str, config: SchedulerProcessConfig | WorkerRankConfig
) -> ProcessSpec:
    several_pods_with_devices = engine.device == "cuda" and options.expected.pods > 1
    return ProcessSpec(
        name=f"rank{engine.rank}",
        target=f"minisgl.launcher.roles:{role}",
        config=config,
        environment=rank_environment(engine.device, options.expected.ranks_per_pod),
        preload=PRELOAD,
        # CUDA IPC between containers fails where both processes have the same id.
        pid_class=(engine.rank, engine.tensor_parallel) if several_pods_with_devices else None,
    )
