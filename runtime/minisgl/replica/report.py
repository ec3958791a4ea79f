"""Bodies of /status of engine pods, from what their launchers know. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from minisgl.launcher.control import Ready
from minisgl.launcher.process import Child, Process, Standby
from minisgl.launcher.restarts import GroupState
from minisgl.replica.diagnosis import rank_of
from minisgl.replica.messages import Epoch
from minisgl.replica.options import EngineOptions
from minisgl.wire.status import EngineInfo, EnginePhase, EngineStatus, Failure, RankStatus

_MAX_NAMED: Final = 8
"""Missing pods that the progress names."""


class PodInfo(msgspec.Struct, frozen=True):
    """Names of a pod and of its node."""

    name: str
    node: str


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State of a launcher besides its processes."""

    epoch: Epoch
    pods: Mapping[int, PodInfo]
    """Pod index → pod, for those that have joined, and for the launcher's own."""
    timings: dict[str, float] = {}
    restarts: int = 0
    last_failure: Failure | None = None
    engine_info: EngineInfo | None = None
    peer_secret: dict[str, str] = {}
    """Fingerprints of the tokens that the pod knows, see PeerSecret."""


def pod_name(options: EngineOptions, pods: Mapping[int, PodInfo], rank: int) -> str:
    """Name of a rank's pod; of one that has not joined, the name that Kubernetes gives it."""
    index = rank // options.identity.ranks_per_pod
    return pods[index].name if index in pods else f"{options.identity.replica}-{index}"


def leader_status(
    options: EngineOptions,
    info: ReplicaInfo,
    group: GroupState,
    processes: Sequence[Child],
    standbys: Sequence[Standby],
    *,
    draining: bool,
) -> EngineStatus:
    """Status of a replica that has not failed. `processes` are those of all ranks, `standbys` those of pod 0."""
    by_rank = {rank_of(process): process for process in processes} if group.phase != "waiting" else {}
    running = group.phase != "terminating"
    ranks = [
        _rank_status(options, info, rank, by_rank.get(rank), running)
        for rank in range(options.identity.tensor_parallel)
    ]
    phase = replica_phase(group, ranks, draining=draining)
    rank0 = by_rank.get(0)
    started = Ready()
    if isinstance(rank0, Process) and rank0.is_ready and rank0.alive:
        started = rank0.ready_message
    return _status(
        options,
        info,
        phase,
        _progress(options, info, phase, ranks),
        phase == "Ready",
        ranks,
        started=started,
        standbys=standbys,
    )


def failed_status(options: EngineOptions, info: ReplicaInfo, message: str) -> EngineStatus:
    """Status of a replica that has failed permanently with `message`."""
    ranks = [
        RankStatus(rank=rank, pod=pod_name(options, info.pods, rank), node="", phase="Failed", progress="")
        for rank in range(options.identity.tensor_parallel)
    ]
    return _status(options, info, "Failed", message, False, ranks)


def member_status(
    options: EngineOptions,
    epoch: Epoch,
    processes: Sequence[Child],
    standbys: Sequence[Standby],
    *,
    phase: EnginePhase | None,
    joined: bool,
    problem: str,
) -> EngineStatus:
    """Status of a member pod. `phase` is Failed or Draining where the replica is; None: it follows from `processes`.
    `problem`: why the pod has not joined."""
    info = ReplicaInfo(epoch=epoch, pods={options.pod_index: PodInfo(options.pod, options.node)})
    ranks = [_rank_status(options, info, rank_of(process), process, True) for process in processes]
    if phase is None and any(process.alive for process in processes):
        phase = next((rank.phase for rank in ranks if rank.phase != "Ready"), "Ready")
    return _status(options, info, phase or "Waiting", problem, joined, ranks, standbys=standbys)


def short_transport(text: str) -> str:
    """Shorten `TensorParallel.transport` to `gloo`, `P2P/IPC`, `NET/Socket`; empty for one rank."""
    library, _, kinds = text.partition(", ")
    if library == "NCCL":
        return kinds.removesuffix(" over NVLink")
    return library if library == "gloo" else ""


def _status(
    options: EngineOptions,
    info: ReplicaInfo,
    phase: EnginePhase,
    progress: str,
    ready: bool,
    ranks: Sequence[RankStatus],
    *,
    started: Ready = Ready(),  # noqa: B008 - it is frozen
    standbys: Sequence[Standby] = (),
) -> EngineStatus:
    return EngineStatus(
        model=options.model_name,
        replica=options.identity.replica,
        pod=options.pod,
        pod_index=options.pod_index,
        revision=options.identity.revision,
        epoch=info.epoch,
        phase=phase,
        progress=progress,
        ready=ready,
        ranks=tuple(ranks),
        ready_ranks=sum(rank.phase == "Ready" for rank in ranks),
        tensor=options.identity.tensor_parallel,
        transport=short_transport(started.transport),
        attention=started.attention,
        data_types=started.data_types,
        timings=info.timings,
        standbys=sum(standby.alive and standby.has_imported for standby in standbys),
        restarts=info.restarts,
        max_restarts=options.limits.max_restarts,
        last_failure=info.last_failure,
        card=info.engine_info,
        peer_secret=info.peer_secret,
    )


def _rank_status(
    options: EngineOptions, info: ReplicaInfo, rank: int, process: Child | None, running: bool
) -> RankStatus:
    """Status of a rank; `process` is None before its start, `running` is false while its group is terminated."""
    phase: EnginePhase = "Waiting"
    progress = ""
    if process is not None:
        running = running and process.alive
        phase = rank_phase(process.is_ready, process.progress) if running else "Restarting"
        progress = "" if process.is_ready or not running else process.progress
        if process.alive and not running:
            progress = "waiting for the exit of its process"
    pod = info.pods.get(rank // options.identity.ranks_per_pod)
    return RankStatus(
        rank=rank,
        pod=pod_name(options, info.pods, rank),
        node="" if pod is None else pod.node,
        phase=phase,
        progress=progress,
    )


def _progress(options: EngineOptions, info: ReplicaInfo, phase: EnginePhase, ranks: Sequence[RankStatus]) -> str:
    if phase == "Waiting":
        missing = [
            pod_name(options, {}, options.identity.ranks(index).start)
            for index in range(options.identity.pods)
            if index not in info.pods
        ]
        return f"waiting for {', '.join(missing[:_MAX_NAMED])}" if missing else ""
    behind = next((rank for rank in ranks if rank.phase != "Ready" and rank.progress), None)
    return "" if behind is None else f"rank {behind.rank}: {behind.progress}"


def rank_phase(ready: bool, progress: str) -> EnginePhase:
    """Phase of a rank whose process runs."""
    if ready:
        return "Ready"
    return "Rendezvous" if progress in ("starting", "rendezvous") else "Loading"


def replica_phase(group: GroupState, ranks: Sequence[RankStatus], *, draining: bool) -> EnginePhase:
    """Phase of a replica whose leader has not given up."""
    if draining:
        return "Draining"
    match group.phase:
        case "waiting":
            return "Waiting"
        case "ready":
            return "Ready"
        case "starting" if group.starts == 1:
            return "Rendezvous" if any(rank.phase == "Rendezvous" for rank in ranks) else "Loading"
    return "Restarting"
