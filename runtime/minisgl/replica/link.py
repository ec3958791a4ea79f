"""What the launchers of a replica's pods say to each other: JSON lines over TCP, from pod 0 to each of the others.

The launcher of pod 0 leads: it supervises the ranks of all pods. The others start, end and watch those of their own
pod for it. The end of the stream is a message too: whoever loses the link ends its ranks.
"""

from __future__ import annotations

import socket
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from minisgl.replica.topology import Place

LINK_VERSION: Final = 1

PING_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
"""After which a peer counts as lost: a machine that is gone closes no connection."""

_MAX_LINE: Final = 256 << 10
_READ_BYTES: Final = 1 << 16

MAX_WORDS: Final = 16 << 10
"""Characters of a dead process's last words that are passed on."""

Name = Annotated[str, Meta(max_length=256)]
Words = Annotated[str, Meta(max_length=MAX_WORDS)]
Epoch = tuple[int, int]


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """First line of a pod that has no rank running. All but the last two must fit what the leader was told."""

    version: int
    replica: Name
    revision: Name
    tensor_parallel: int
    ranks_per_pod: int
    pod_index: int
    pod: Name
    place: Place


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Start your ranks."""

    epoch: Epoch
    rendezvous: Name
    first_device: int | None
    """Of the visible CUDA devices, the one of the pod's first rank."""
    nccl_host: Name


class End(msgspec.Struct, frozen=True, tag="end"):
    """Kill your ranks of this epoch, and say when they are gone."""

    epoch: Epoch


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """You belong to the replica until the link is lost."""


class Rejected(msgspec.Struct, frozen=True, tag="turned"):
    """You cannot join; the link ends. Try again: one of us may be about to be replaced."""

    message: Words


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """The replica has failed for good; the link ends."""

    message: Words


class Drained(msgspec.Struct, frozen=True, tag="over"):
    """What was under way has been answered: you may end."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Still here."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """This pod was told to end, and waits for `Drained`."""


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    epoch: Epoch
    rank: int
    text: Words


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    epoch: Epoch
    rank: int


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Its process is reaped."""

    epoch: Epoch
    rank: int
    exit_code: int
    told_to_end: bool
    code: Name
    """Of its refusal; empty when it gave none."""
    reason: Name
    """See `failures.Failure`."""
    message: Words


ToLeader = Join | Ping | Leaving | RankProgress | RankReady | RankEnded
FromLeader = Accepted | Rejected | Begin | End | Drained | GaveUp | Ping

to_leader: Final[msgspec.json.Decoder[ToLeader]] = msgspec.json.Decoder(ToLeader)
from_leader: Final[msgspec.json.Decoder[FromLeader]] = msgspec.json.Decoder(FromLeader)


class LinkLost(Exception):
    """The connection is of no use any more; the message says why."""


class Connection:
    """One end of a link. Nothing blocks; what cannot be sent at once is a lost link, for messages are few and small."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.local_host = _host(connection.getsockname()[0])
        self.peer_host = _host(connection.getpeername()[0])
        self._rest = b""

    def send(self, message: ToLeader | FromLeader) -> None:
        """Raises LinkLost."""
        try:
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise LinkLost(f"cannot send: {error.strerror or error}") from error

    def receive(self) -> list[bytes]:
        """Whole lines that are there. Raises LinkLost at the end of the stream, once all lines were returned."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(f"cannot receive: {error.strerror or error}") from error
        if not data:
            raise LinkLost("the other side closed it")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise LinkLost(f"a line is longer than {_MAX_LINE} bytes")
        return lines

    def close(self) -> None:
        self.socket.close()


def _host(address: str) -> str:
    """An IPv4 peer of a socket for both families has an address of IPv6."""
    return address.removeprefix("::ffff:") if "." in address else address


def bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host
