"""Phases of ranks and replicas."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.launcher.restarts import GroupState
from minisgl.wire.status import EnginePhase, RankStatus


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
