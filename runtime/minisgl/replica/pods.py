"""Member pods of a replica, seen from the leader: which have joined, and their ranks."""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Sequence
from functools import partial
from typing import Final

from minisgl.launcher.listener import listen_on_all
from minisgl.replica import messages
from minisgl.replica.link import SILENCE_SECONDS, Link, LinkClosed
from minisgl.replica.options import ReplicaIdentity
from minisgl.replica.remote_rank import RemoteRank
from minisgl.wire.peer_secret import PeerSecret

logger = logging.getLogger(__name__)

_MAX_UNIDENTIFIED: Final = 64
"""Most connections that have not sent `Join`. With more, the oldest one is closed: a pod sends it immediately, and gets
in between others that connect again and again."""

LeaderLink = Link[messages.ToLeader]


class JoinedPod:
    """A member pod that has joined."""

    def __init__(self, link: LeaderLink, join: messages.Join) -> None:
        self.link = link
        self.name = join.pod
        self.index = join.pod_index
        self.topology = join.topology
        self.drain_requested = False
        self.ranks: dict[int, RemoteRank] = {}

    def start(self, message: messages.StartRanks, ranks: range) -> list[RemoteRank]:
        """Have the pod start its ranks."""

        def kill() -> None:
            self.send(messages.KillRanks(message.epoch))

        self.ranks = {rank: RemoteRank(rank, self.name, kill) for rank in ranks}
        self.send(message)
        return list(self.ranks.values())

    def send(self, message: messages.FromLeader) -> None:
        # A broken link is noticed when it is read.
        with contextlib.suppress(LinkClosed):
            self.link.send(message)


class MemberPods:
    """Listens on the link port. Everything happens in callbacks of the selector that was passed to `watch` last."""

    def __init__(self, identity: ReplicaIdentity, port: int, secret: PeerSecret) -> None:
        """Raises LauncherError `address_unavailable`."""
        self._identity = identity
        self._secret = secret
        self.joined: dict[int, JoinedPod] = {}
        """Pod index → pod."""
        self._links: dict[LeaderLink, JoinedPod | None] = {}
        """All connections; None: it has not sent `Join`."""
        self._epoch: messages.Epoch = (0, 0)
        self._selector: selectors.BaseSelector | None = None
        self._listener = listen_on_all("link", port) if identity.pods > 1 else None
        if self._listener is not None:
            # A connection may be closed between the selector's event and `accept`.
            self._listener.setblocking(False)

    def watch(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for link in self._links:
            self._watch(link)

    @property
    def complete(self) -> bool:
        """All pods have joined, and none of them was asked to stop."""
        return len(self.joined) == self._identity.pods - 1 and not self.drain_requested

    @property
    def drain_requested(self) -> bool:
        return any(pod.drain_requested for pod in self.joined.values())

    def start(self, orders: Sequence[messages.StartRanks]) -> list[RemoteRank]:
        """Start the ranks of pods 1, 2, …, all of which have joined; there is one message for each."""
        self._epoch = orders[0].epoch if orders else self._epoch
        return [
            rank
            for index, message in enumerate(orders, 1)
            for rank in self.joined[index].start(message, self._identity.ranks(index))
        ]

    def tick(self, now: float) -> None:
        """Close silent links and those without `Join`, and send pings to the joined pods. Call it every second or
        so."""
        for link, pod in list(self._links.items()):
            if pod is None and now - link.opened_at > SILENCE_SECONDS:
                self._disconnect(link, "no join message received")
            else:
                link.tick(now, ping=pod is not None)

    def release(self, *, everybody: bool) -> None:
        """Tell the pods that were asked to stop, or all of them, that requests have been drained."""
        for pod in list(self.joined.values()):
            if everybody or pod.drain_requested:
                pod.send(messages.Drained())
                self._close(pod.link)

    def give_up(self, message: str) -> None:
        """Tell all pods that the replica has failed permanently, and stop listening."""
        for pod in self.joined.values():
            pod.send(messages.GaveUp(message))
        self.close()

    def close(self) -> None:
        for link in list(self._links):
            self._close(link)
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It was closed before it was accepted.
            return
        try:
            link = Link(connection, messages.to_leader)
        except OSError:
            connection.close()
            return
        self._links[link] = None
        self._watch(link)
        if len(self._links) - len(self.joined) > _MAX_UNIDENTIFIED:
            self._close(next(link for link, pod in self._links.items() if pod is None))

    def _watch(self, link: LeaderLink) -> None:
        assert self._selector is not None
        link.watch(self._selector, partial(self._handle, link), partial(self._disconnect, link))

    def _handle(self, link: LeaderLink, message: messages.ToLeader) -> None:
        pod = self._links[link]
        if pod is None:
            if not isinstance(message, messages.Join):
                raise LinkClosed("no join message received")
            self._join(link, message)
            return
        match message:
            case messages.DrainRequested():
                logger.info("pod %s was asked to stop", pod.name)
                pod.drain_requested = True
            case messages.RankProgress() | messages.RankReady() | messages.RankEnded():
                rank = pod.ranks.get(message.rank)
                if rank is not None and message.epoch == self._epoch:
                    rank.update(message)

    def _join(self, link: LeaderLink, join: messages.Join) -> None:
        greeting = ("join", join.replica, join.revision, str(join.pod_index), join.pod)
        if self._secret.refuses(join.proof, *greeting):
            problem = "it does not know the secret of the model's pods"
        else:
            problem = _join_problem(join, self._identity)
        if problem:
            logger.warning("pod %s cannot join: %s", join.pod, problem)
            link.send(messages.Rejected(problem))
            raise LinkClosed("pod was rejected")
        if (old := self.joined.get(join.pod_index)) is not None:
            self._disconnect(old.link, "the pod has joined again")
        self._links[link] = self.joined[join.pod_index] = JoinedPod(link, join)
        link.send(messages.Accepted())
        logger.info("pod %s has joined", join.pod, extra={"node": join.topology.node})

    def _disconnect(self, link: LeaderLink, why: str) -> None:
        pod = self._close(link)
        if pod is not None:
            level = logging.INFO if pod.drain_requested else logging.ERROR
            logger.log(level, "the link to pod %s is lost: %s", pod.name, why)
            for rank in pod.ranks.values():
                rank.disconnected(f"the link to its pod {pod.name} was lost: {why}")

    def _close(self, link: LeaderLink) -> JoinedPod | None:
        """Close a link; returns its pod."""
        if link not in self._links:
            return None
        pod = self._links.pop(link)
        if pod is not None:
            del self.joined[pod.index]
        link.close()
        return pod


def _join_problem(join: messages.Join, identity: ReplicaIdentity) -> str:
    """Reason why the pod does not belong to the replica; empty when it does."""
    if join.version != messages.LINK_VERSION:
        versions = f"its link version is {join.version}, that of pod 0 is {messages.LINK_VERSION}"
        return f"{versions}: run all pods from one image"
    for name in ReplicaIdentity.__struct_fields__:
        value, wanted = getattr(join, name), getattr(identity, name)
        if value != wanted:
            return (
                f"its {name.replace('_', ' ')} is {value!r}, that of pod 0 is {wanted!r}: "
                "delete the pods of the older revision"
            )
    if not 0 < join.pod_index < identity.pods:
        return f"pod index {join.pod_index} is out of range: member pods are 1 to {identity.pods - 1}"
    return ""
