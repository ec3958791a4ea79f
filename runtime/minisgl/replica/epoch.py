"""From one start of a replica to the next: what each pod's ranks are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.rank_specs import file_rendezvous, ipc_plans, rank_specs
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
    ranks_per_pod = options.expected.ranks_per_pod
    places = [place, *(other.place for other in others)]
    neighbours = bool(try_neighbours and others) and are_neighbours(places, options.engine.tensor_parallel)
    if others:
        # Numbers, not names: a pod that could reach pod 0 at this address can reach the rendezvous too.
        rendezvous = f"tcp://{bracketed(others[0].leader_host)}:{options.ports.rendezvous}"
    else:
        rendezvous = file_rendezvous(sockets, epoch[1])
    begins = [
        Begin(
            epoch=epoch,
            rendezvous=rendezvous,
            first_device=first if options.engine.device == "cuda" else None,
            nccl_host=place.node if neighbours else "",
        )
        for first in first_devices(places, ranks_per_pod)
    ]
    local_plans = ipc_plans(sockets, range(ranks_per_pod))
    remote_plans = [
        f"tcp://{bracketed(other.host)}:{options.ports.plans + rank}"
        for index, other in enumerate(others, 1)
        for rank in _ranks(options, index)
    ]
    scheduler = SchedulerProcessConfig(
        engine=options.engine,
        address=f"tcp://*:{options.ports.scheduler}",
        followers=(*local_plans.values(), *remote_plans),
        model_name=options.model_name,
        replica=options.expected.replica,
        replica_revision=options.expected.revision,
        drains=True,
        tokenizer_hashes=tokenizer_hashes,
        epoch=epoch,
    )
    local = _pod_specs(options, 0, begins[0], local_plans, scheduler)
    return EpochPlan(begin=begins[1:], local=local, neighbours=neighbours)


def member_pod_ranks(options: EngineOptions, begin: Begin) -> list[ProcessSpec]:
    """Specs of the ranks of a member pod."""
    ranks = _ranks(options, options.pod_index)
    plans = {rank: f"tcp://*:{options.ports.plans + rank}" for rank in ranks}
    return _pod_specs(options, options.pod_index, begin, plans)


def _ranks(options: EngineOptions, pod_index: int) -> range:
    count = options.expected.ranks_per_pod
    return range(pod_index * count, (pod_index + 1) * count)


def _pod_specs(
    options: EngineOptions,
    pod_index: int,
    begin: Begin,
    plans: Mapping[int, str],
    scheduler: SchedulerProcessConfig | None = None,
) -> list[ProcessSpec]:
    engine = msgspec.structs.replace(options.engine, rendezvous=begin.rendezvous, nccl_host=begin.nccl_host)
    return rank_specs(engine, _ranks(options, pod_index), plans, scheduler, first_device=begin.first_device)
