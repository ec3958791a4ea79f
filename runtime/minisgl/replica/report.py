"""The status of a replica, from what the launcher of pod 0 knows. Pure: it only looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from minisgl.launcher.process import Child, Process
from minisgl.launcher.restarts import GroupState
from minisgl.replica.options import EngineOptions
from minisgl.replica.post_mortem import rank_of
from minisgl.replica.status import rank_phase, replica_phase, short_transport, standing_by
from minisgl.wire.status import EngineInfo, EnginePhase, EngineStatus, Failure, RankStatus

_NAMED: Final = 8
"""Pods that a line of progress names at most."""


class PodFacts(msgspec.Struct, frozen=True):
    """Of a pod that has joined, or of pod 0."""

    name: str
    node: str


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher remembers, whether ranks run or not."""

    epoch: tuple[int, int]
    timings: dict[str, float]
    restarts: int
    last_failure: Failure | None
    card: EngineInfo | None
    pods: Mapping[int, PodFacts]
    """By index; those that are not there are left out."""


def pod_name(options: EngineOptions, pods: Mapping[int, PodFacts], rank: int) -> str:
    """Also of a pod that is not there: then as Kubernetes names it."""
    index = rank // options.expected.ranks_per_pod
    return pods[index].name if index in pods else f"{options.expected.replica}-{index}"


def running_status(
    options: EngineOptions,
    facts: ReplicaFacts,
    group: GroupState,
    processes: Sequence[Child],
    standbys: Sequence[Child],
    *,
    draining: bool,
) -> EngineStatus:
    """Of a replica that runs, or is about to. `processes` are those of its ranks, `standbys` pod 0's."""
    by_rank = {rank_of(process): process for process in processes}
    ranks = tuple(
        _rank(options, facts, rank, by_rank.get(rank), group) for rank in range(options.expected.tensor_parallel)
    )
    phase = replica_phase(group, ranks, draining=draining)
    rank0 = by_rank.get(0)
    transport = ""
    if isinstance(rank0, Process) and rank0.is_ready and rank0.alive:
        transport = short_transport(rank0.ready_message.transport)
    progress = _progress(options, facts, phase, ranks)
    return _status(options, facts, phase, progress, ranks, transport, standing_by(standbys))


def failed_status(options: EngineOptions, facts: ReplicaFacts, message: str) -> EngineStatus:
    """Of a replica that was given up because of what `message` says."""
    ranks = tuple(
        RankStatus(rank=rank, pod=pod_name(options, facts.pods, rank), node="", phase="Failed", progress="")
        for rank in range(options.expected.tensor_parallel)
    )
    return _status(options, facts, "Failed", message, ranks, "", 0)


def _status(
    options: EngineOptions,
    facts: ReplicaFacts,
    phase: EnginePhase,
    progress: str,
    ranks: tuple[RankStatus, ...],
    transport: str,
    standbys: int,
) -> EngineStatus:
    return EngineStatus(
        model=options.model_name,
        replica=options.expected.replica,
        pod=options.pod,
        pod_index=0,
        revision=options.expected.revision,
        epoch=facts.epoch,
        phase=phase,
        progress=progress,
        ready=phase == "Ready",
        ranks=ranks,
        ready_ranks=sum(rank.phase == "Ready" for rank in ranks),
        tensor=options.expected.tensor_parallel,
        transport=transport,
        timings=facts.timings,
        standbys=standbys,
        restarts=facts.restarts,
        max_restarts=options.limits.max_restarts,
        last_failure=facts.last_failure,
        card=facts.card,
    )


def _rank(
    options: EngineOptions, facts: ReplicaFacts, rank: int, process: Child | None, group: GroupState
) -> RankStatus:
    phase: EnginePhase = "Waiting"
    progress = ""
    if process is not None and group.phase != "waiting":
        running = process.alive and group.phase != "ending"
        phase = rank_phase(process.is_ready, process.progress) if running else "Restarting"
        progress = "" if process.is_ready or not running else process.progress
    pod = facts.pods.get(rank // options.expected.ranks_per_pod)
    return RankStatus(
        rank=rank,
        pod=pod_name(options, facts.pods, rank),
        node="" if pod is None else pod.node,
        phase=phase,
        progress=progress,
    )


def _progress(options: EngineOptions, facts: ReplicaFacts, phase: EnginePhase, ranks: Sequence[RankStatus]) -> str:
    if phase == "Waiting":
        count = options.expected.ranks_per_pod
        missing = [
            pod_name(options, {}, index * count) for index in range(options.expected.pods) if index not in facts.pods
        ]
        return f"waiting for {', '.join(missing[:_NAMED])}" if missing else ""
    behind = next((rank for rank in ranks if rank.phase != "Ready" and rank.progress), None)
    return "" if behind is None else f"rank {behind.rank}: {behind.progress}"
