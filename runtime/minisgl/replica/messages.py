"""Messages between the launchers of a replica: one JSON line each, over TCP between pod 0 and each member pod.

The launcher of pod 0 leads: it supervises the ranks of all pods. The launchers of member pods start, kill and watch the
ranks of their pods for it. The end of the stream is a message too: a member pod that loses its link kills its ranks.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from minisgl.wire.peer_secret import Proof

LINK_VERSION: Final = 2
"""Of these messages, and of what else the ranks of several pods must have in common. 2: ranks take plans only with a
token."""

MAX_TEXT: Final = 16 << 10
"""Characters of a text, such as the last words of a process."""

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Epoch = tuple[int, int]
"""Boot time of the leader in ms, then the number of the start."""


class PodTopology(msgspec.Struct, frozen=True, kw_only=True):
    """Node and devices of a pod."""

    node: Name
    """Empty: unknown."""
    devices: Annotated[tuple[Name, ...], Meta(max_length=256)]
    """UUIDs of the visible CUDA devices, in the order of their indices in the pod."""
    shm_device: int
    """`st_dev` of /dev/shm; -1: unknown."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """First message of a member pod without running ranks. All fields but the last three must match the leader's."""

    version: int
    replica: Name
    revision: Name
    tensor_parallel: int
    ranks_per_pod: int
    pod_index: int
    pod: Name
    topology: PodTopology
    proof: Proof = ""
    """Proof of PeerSecret for `join`, replica, revision, index and name of the pod."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The pod belongs to the replica until the link closes."""


class Rejected(msgspec.Struct, frozen=True, tag="turned"):
    """The pod cannot join, and the link closes. The pod retries: it or the leader may be about to be replaced."""

    message: Text


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Start the ranks of the pod."""

    epoch: Epoch
    rendezvous: Name
    first_device: int | None
    """Index of the CUDA device of the pod's first rank; None on a CPU."""
    nccl_host: Name
    plans_token: Name = ""
    """Token of PlanBroadcast and of the PlanReceivers of the pod; it is another one for each start."""


class KillRanks(msgspec.Struct, frozen=True, tag="end"):
    """Kill the ranks of this epoch, and report each with `RankEnded`."""

    epoch: Epoch


class Drained(msgspec.Struct, frozen=True, tag="over"):
    """All running requests have been answered: the pod may exit."""


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """The replica has failed permanently, and the link closes."""

    message: Text


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keepalive, in both directions."""


class DrainRequested(msgspec.Struct, frozen=True, tag="leaving"):
    """The pod was asked to stop, and waits for `Drained`."""


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Step of the start that a rank has reached, or how it hangs."""

    epoch: Epoch
    rank: int
    text: Text
    hangs: bool = False
    """The rank hangs, and `text` says how."""


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """A rank is ready."""

    epoch: Epoch
    rank: int


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The process of a rank has exited."""

    epoch: Epoch
    rank: int
    exit_code: int
    terminated_by_us: bool
    """A launcher killed it: the exit is no failure of its own."""
    code: Name
    """Code of its start error; empty when it reported none."""
    reason: Name
    """A `wire.status.FailureReason`."""
    message: Text


ToLeader = Join | Ping | DrainRequested | RankProgress | RankReady | RankEnded
FromLeader = Accepted | Rejected | StartRanks | KillRanks | Drained | GaveUp | Ping

to_leader: Final[msgspec.json.Decoder[ToLeader]] = msgspec.json.Decoder(ToLeader)
from_leader: Final[msgspec.json.Decoder[FromLeader]] = msgspec.json.Decoder(FromLeader)
