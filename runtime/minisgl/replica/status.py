"""What an engine pod says of itself over HTTP: the body of /status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from minisgl.launcher import restarts
from minisgl.launcher.control import STANDING_BY
from minisgl.launcher.process import Child
from minisgl.replica.failures import Failure

Phase = Literal["Waiting", "Rendezvous", "Loading", "Ready", "Restarting", "Draining", "Failed"]


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    pod: str
    node: str
    phase: Phase
    progress: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """Of a replica where pod 0 says it, of its own ranks where another pod does."""

    model: str
    replica: str
    pod: str
    pod_index: int
    revision: str
    epoch: tuple[int, int]
    phase: Phase
    progress: str
    ready: bool
    ranks: tuple[RankStatus, ...]
    ready_ranks: int
    tensor: int
    transport: str
    timings: dict[str, float]
    """Seconds of each part of the last start, see `timeline.STAGES`."""
    standbys: int
    """Processes of this pod that wait with their imports done, so that a restart need not do them."""
    restarts: int
    """Within the window."""
    max_restarts: int
    last_failure: Failure | None
    card: EngineInfo | None


def standing_by(standbys: Sequence[Child]) -> int:
    return sum(standby.alive and standby.progress == STANDING_BY for standby in standbys)


def short_transport(text: str) -> str:
    """`TensorParallel.transport` without what goes without saying: `gloo`, `P2P/IPC`, `NET/Socket`; empty for one
    rank."""
    library, _, kinds = text.partition(", ")
    if library == "NCCL":
        return kinds.removesuffix(" over NVLink")
    return library if library == "gloo" else ""


def rank_phase(ready: bool, progress: str) -> Phase:
    """Of a process that runs."""
    if ready:
        return "Ready"
    return "Rendezvous" if progress in ("starting", "rendezvous") else "Loading"


def replica_phase(group: restarts.GroupState, ranks: Sequence[RankStatus], *, draining: bool) -> Phase:
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
