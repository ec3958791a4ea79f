"""Options of `minisgl engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from minisgl.config import EngineConfig
from minisgl.launcher.restarts import Limits
from minisgl.logging import LogOptions
from minisgl.options import Seconds, option
from minisgl.wire.peer_secret import SECRET_DIRECTORY, PeerSecret, SecretDirectory
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

    replica: Annotated[str, option("name of the replica")] = "engine"
    revision: Annotated[
        str, option("revision of this pod; pods of another one cannot join", default="empty", metavar="TEXT")
    ] = msgspec.field(default="", name="revision_label")
    tensor_parallel: int = 1
    ranks_per_pod: int = 1

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
    identity: ReplicaIdentity = ReplicaIdentity()
    model_name: Annotated[str, option("the model's name in the API", default="the directory's name")] = msgspec.field(
        default="", name="served_model_name"
    )
    pod_index: int = 0
    pod: Annotated[str, option("name of this pod", default="MINISGL_POD_NAME, or the host name")] = msgspec.field(
        default="", name="pod_name"
    )
    node: Annotated[str, option("node of this pod", default="MINISGL_NODE_NAME, or unknown")] = msgspec.field(
        default="", name="node_name"
    )
    leader: Annotated[str, option("host of pod 0", default="REPLICA-0.PEER_DOMAIN", metavar="HOST")] = ""
    ports: Ports = Ports()
    peer_secret: SecretDirectory = SECRET_DIRECTORY
    limits: Limits
    drain_timeout: Annotated[
        Seconds,
        option(
            "time for running requests to finish after SIGTERM or /drain; a second SIGTERM stops them",
            default="{:g} seconds",
        ),
    ] = 300.0
    stall_seconds: Annotated[
        Seconds,
        option("maximum time of a step; beyond it the ranks are killed and restarted", default="{:g} seconds"),
    ] = msgspec.field(default=60.0, name="stall_timeout")
    directory: Annotated[
        Path, option("directory for the pod's restarts; must outlive the container", metavar="DIR")
    ] = msgspec.field(default=Path("/run/minisgl"), name="state_directory")
    log: LogOptions = LogOptions()

    @property
    def secret_demand(self) -> Path:
        """File whose age tells the processes of the pod whether the secret is required, see PeerSecret."""
        return self.directory / "peer-secret-required"

    def secret(self) -> PeerSecret:
        return PeerSecret(self.peer_secret, self.secret_demand)
