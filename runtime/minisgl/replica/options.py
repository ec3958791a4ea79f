"""Options of `minisgl engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from minisgl.config import EngineConfig
from minisgl.launcher.restarts import Limits
from minisgl.logging import LogOptions
from minisgl.options import option
from minisgl.wire.status import CONTROL_PORT, LINK_PORT, PLANS_PORT, RENDEZVOUS_PORT, SCHEDULER_PORT

PodPort = Annotated[int, Meta(ge=1, le=65535)]
"""TCP port that other pods know, so it cannot be any free one."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """TCP ports, the same in all pods of a replica; see `wire.status`."""

    control: Annotated[PodPort, option("probes, status and tokenizer files over HTTP")] = msgspec.field(
        default=CONTROL_PORT, name="control_port"
    )
    scheduler: Annotated[PodPort, option("requests of frontends, on pod 0")] = msgspec.field(
        default=SCHEDULER_PORT, name="scheduler_port"
    )
    link: Annotated[PodPort, option("links between launchers, on pod 0")] = msgspec.field(
        default=LINK_PORT, name="link_port"
    )
    rendezvous: Annotated[PodPort, option("rendezvous of the ranks of several pods, on pod 0")] = msgspec.field(
        default=RENDEZVOUS_PORT, name="rendezvous_port"
    )
    plans: Annotated[
        PodPort, option("step plans of rank 0; each rank of another pod listens on this port plus its rank")
    ] = msgspec.field(default=PLANS_PORT, name="plans_port")


class ReplicaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Values that all pods of a replica must agree on; names as in `messages.Join`."""

    replica: str
    revision: str
    tensor_parallel: int
    ranks_per_pod: int

    @property
    def pods(self) -> int:
        return self.tensor_parallel // self.ranks_per_pod

    def ranks(self, pod_index: int) -> range:
        """Ranks of one pod."""
        return range(pod_index * self.ranks_per_pod, (pod_index + 1) * self.ranks_per_pod)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine pod."""

    engine: EngineConfig
    """Configuration of every rank; each start fills in rank, rendezvous and device."""
    identity: ReplicaIdentity
    model_name: str
    pod_index: int
    pod: str
    node: str
    leader: str
    """Host of pod 0."""
    ports: Ports
    limits: Limits
    drain_timeout: float
    """Seconds."""
    directory: Path
    """Directory that outlives the container, but not the pod."""
    log: LogOptions = LogOptions()
