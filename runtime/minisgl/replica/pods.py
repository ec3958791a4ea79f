"""The other pods of a replica, as the launcher of pod 0 sees them: who has joined, and their ranks."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from minisgl.launcher.errors import LauncherError
from minisgl.replica.link import (
    LINK_VERSION,
    PING_SECONDS,
    SILENCE_SECONDS,
    Accepted,
    Begin,
    Connection,
    Drained,
    End,
    Epoch,
    FromLeader,
    GaveUp,
    Join,
    Leaving,
    LinkLost,
    Ping,
    RankEnded,
    RankProgress,
    RankReady,
    Rejected,
    to_leader,
)
from minisgl.replica.remote_rank import RemoteRank
from minisgl.replica.topology import Place

logger = logging.getLogger(__name__)

_MOST_STRANGERS: Final = 64
"""Connections that have not said who they are; one more is closed at once."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What every pod of the replica was told too."""

    replica: str
    revision: str
    tensor_parallel: int
    ranks_per_pod: int

    @property
    def pods(self) -> int:
        return self.tensor_parallel // self.ranks_per_pod


class Member:
    """A pod that has joined."""

    def __init__(self, connection: Connection, join: Join) -> None:
        self.connection = connection
        self.pod = join.pod
        self.place: Place = join.place
        self.leaving = False
        self.ranks: dict[int, RemoteRank] = {}
        self._index = join.pod_index
        self._ranks_per_pod = join.ranks_per_pod

    def begin(self, message: Begin) -> list[RemoteRank]:
        """Have the pod start its ranks."""
        first = self._index * self._ranks_per_pod

        def end() -> None:
            self.send(End(message.epoch))

        self.ranks = {rank: RemoteRank(rank, self.pod, end) for rank in range(first, first + self._ranks_per_pod)}
        self.send(message)
        return list(self.ranks.values())

    def send(self, message: FromLeader) -> None:
        # A link that broke is noticed where it is read.
        with contextlib.suppress(LinkLost):
            self.connection.send(message)


class Pods:
    """Listens on the link port; everything happens in callbacks of the selector that it was told to use last."""

    def __init__(self, expected: Expected, port: int) -> None:
        """Raises LauncherError `address_unavailable`."""
        self._expected = expected
        self.members: dict[int, Member] = {}
        self._heard: dict[Connection, float] = {}
        """All connections, strangers too, and when something came from them."""
        self._epoch: Epoch = (0, 0)
        self._selector: selectors.BaseSelector | None = None
        self._listener = _listen(port) if expected.pods > 1 else None
        self._next_ping = 0.0

    def watch(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for connection in self._heard:
            self._watch(connection)

    @property
    def missing(self) -> list[int]:
        """Indices of the pods that have not joined, or are about to go."""
        there = {index for index, member in self.members.items() if not member.leaving}
        return sorted(set(range(1, self._expected.pods)) - there)

    @property
    def somebody_leaves(self) -> bool:
        return any(member.leaving for member in self.members.values())

    def begin(self, messages: Sequence[Begin]) -> list[RemoteRank]:
        """Start the ranks of all pods, which are there; `messages` for pods 1, 2, …"""
        self._epoch = messages[0].epoch if messages else self._epoch
        return [rank for index, message in enumerate(messages, 1) for rank in self.members[index].begin(message)]

    def turn(self, now: float) -> float | None:
        """What is due by the clock; returns when something is again."""
        if self._listener is None:
            return None
        for connection, heard in list(self._heard.items()):
            if now - heard > SILENCE_SECONDS:
                self._lose(connection, f"nothing came from it for {SILENCE_SECONDS:g} s")
        if now >= self._next_ping:
            self._next_ping = now + PING_SECONDS
            for member in self.members.values():
                member.send(Ping())
        return self._next_ping

    def release(self, *, everybody: bool) -> None:
        """Tell those that leave, or everybody, that what was under way has been answered."""
        for index, member in list(self.members.items()):
            if everybody or member.leaving:
                member.send(Drained())
                del self.members[index]
                self._close(member.connection)

    def give_up(self, message: str) -> None:
        """Tell everybody that the replica has failed for good, and listen no more."""
        for member in self.members.values():
            member.send(GaveUp(message))
        self.close()

    def close(self) -> None:
        for connection in list(self._heard):
            self._close(connection)
        self.members.clear()
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            # It went away again before we came to it.
            return
        strangers = len(self._heard) - len(self.members)
        if strangers >= _MOST_STRANGERS:
            accepted.close()
            return
        try:
            connection = Connection(accepted)
        except OSError:
            accepted.close()
            return
        self._heard[connection] = time.monotonic()
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        assert self._selector is not None
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        try:
            lines = connection.receive()
            if lines:
                self._heard[connection] = time.monotonic()
            for line in lines:
                self._take(connection, line)
        except LinkLost as error:
            self._lose(connection, str(error))

    def _take(self, connection: Connection, line: bytes) -> None:
        try:
            message = to_leader.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LinkLost(f"it sent a line that is not understood: {error}") from error
        member = next((member for member in self.members.values() if member.connection is connection), None)
        match message:
            case Join():
                if member is None:
                    self._join(connection, message)
            case _ if member is None:
                raise LinkLost("it did not say who it is")
            case Leaving():
                logger.info("pod %s was told to end", member.pod)
                member.leaving = True
            case RankProgress() | RankReady() | RankEnded():
                rank = member.ranks.get(message.rank)
                if rank is not None and message.epoch == self._epoch:
                    rank.take(message)

    def _join(self, connection: Connection, join: Join) -> None:
        problem = _problem(join, self._expected)
        if problem:
            logger.warning("pod %s cannot join: %s", join.pod, problem)
            connection.send(Rejected(problem))
            raise LinkLost("it was turned away")
        if (old := self.members.get(join.pod_index)) is not None:
            self._lose(old.connection, "the pod has joined anew")
        self.members[join.pod_index] = Member(connection, join)
        connection.send(Accepted())
        logger.info("pod %s has joined", join.pod, extra={"node": join.place.node})

    def _lose(self, connection: Connection, why: str) -> None:
        self._close(connection)
        for index, member in list(self.members.items()):
            if member.connection is connection:
                del self.members[index]
                logger.log(
                    logging.INFO if member.leaving else logging.ERROR, "the link to pod %s is lost: %s", member.pod, why
                )
                for rank in member.ranks.values():
                    rank.lose(f"the link to its pod {member.pod} was lost: {why}")

    def _close(self, connection: Connection) -> None:
        if self._heard.pop(connection, None) is None:
            return
        watched = self._selector.get_map() if self._selector is not None else None
        # A selector that was closed has no map.
        if watched is not None and connection.socket in watched:
            assert self._selector is not None
            self._selector.unregister(connection.socket)
        connection.close()


def _problem(join: Join, expected: Expected) -> str:
    """Why this pod is none of ours; empty when it is."""
    if join.version != LINK_VERSION:
        return f"it speaks version {join.version} of the link, this one {LINK_VERSION}: run all pods from one image"
    for name in Expected.__struct_fields__:
        theirs, ours = getattr(join, name), getattr(expected, name)
        if theirs != ours:
            return (
                f"its {name.replace('_', ' ')} is {theirs!r}, that of pod 0 {ours!r}: delete the pods of the older one"
            )
    if not 0 < join.pod_index < expected.pods:
        return f"pod index {join.pod_index} is none of 1 to {expected.pods - 1}"
    return ""


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise LauncherError(
            "address_unavailable", f"cannot listen on link port {port}: {error.strerror}. Choose another: --link-port"
        ) from error
    listener.setblocking(False)
    return listener
