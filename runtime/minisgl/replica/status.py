"""What an engine pod says of itself over HTTP: the body of /status."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.launcher import restarts
from minisgl.launcher.control import STANDING_BY
from minisgl.launcher.process import Child
from minisgl.wire.status import EnginePhase, RankStatus


def standing_by(standbys: Sequence[Child]) -> int:
    return sum(standby.alive and standby.progress == STANDING_BY for standby in standbys)


def short_transport(text: str) -> str:
    """`TensorParallel.transport` without what goes without saying: `gloo`, `P2P/IPC`, `NET/Socket`; empty for one
    rank."""
    library, _, kinds = text.partition(", ")
    if library == "NCCL":
        return kinds.removesuffix(" over NVLink")
    return library if library == "gloo" else ""


def rank_phase(ready: bool, progress: str) -> EnginePhase:
    """Of a process that runs."""
    if ready:
        return "Ready"
    return "Rendezvous" if progress in ("starting", "rendezvous") else "Loading"


def replica_phase(group: restarts.GroupState, ranks: Sequence[RankStatus], *, draining: bool) -> EnginePhase:
    """Of a replica whose launcher has not given up."""
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
