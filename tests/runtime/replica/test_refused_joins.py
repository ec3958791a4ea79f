"""Pods that join a replica whose pods share a secret."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from minisgl.replica.messages import LINK_VERSION, Accepted, FromLeader, Join, PodTopology, Rejected, from_leader
from minisgl.replica.options import ReplicaIdentity
from minisgl.replica.pods import MemberPods
from minisgl.wire.peer_secret import PeerSecret
from support.launcher.ports import free_port
from support.launcher.required_secret import required_secret

IDENTITY = ReplicaIdentity(replica="r", revision="a", tensor_parallel=2, ranks_per_pod=1)
PORT = free_port()


@pytest.fixture
def secret(tmp_path: Path) -> PeerSecret:
    return required_secret(tmp_path)


@pytest.fixture
def pods(secret: PeerSecret) -> Iterator[MemberPods]:
    pods = MemberPods(IDENTITY, PORT, secret)
    yield pods
    pods.close()


def answer(pods: MemberPods, proof: str, version: int = LINK_VERSION) -> FromLeader:
    """The leader's answer to pod 1, which joins with this proof."""
    topology = PodTopology(node="n", devices=(), shm_device=-1)
    identity = msgspec.structs.asdict(IDENTITY)
    join = Join(version=version, **identity, pod_index=1, pod="r-1", topology=topology, proof=proof)
    with selectors.DefaultSelector() as selector, socket.create_connection(("127.0.0.1", PORT), 60) as connection:
        pods.watch(selector)
        connection.sendall(msgspec.json.encode(join) + b"\n")
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    return from_leader.decode(connection.recv(65536).partition(b"\n")[0])
                key.data()


def test_a_pod_that_knows_the_secret_joins(pods: MemberPods, secret: PeerSecret) -> None:
    assert isinstance(answer(pods, secret.proof("join", "r", "a", "1", "r-1")), Accepted)
    assert list(pods.joined) == [1]


@pytest.mark.parametrize("words", [(), ("join", "r", "a", "2", "r-1"), ("scheduler", "r", "a", "1", "r-1")])
def test_a_pod_without_a_proof_of_its_own_is_turned_away(
    pods: MemberPods, secret: PeerSecret, words: tuple[str, ...]
) -> None:
    refusal = answer(pods, secret.proof(*words) if words else "")
    assert isinstance(refusal, Rejected)
    assert "secret" in refusal.message
    assert pods.joined == {}


def test_a_pod_of_another_version_is_told_that_its_image_is_another_one(pods: MemberPods, secret: PeerSecret) -> None:
    """Its ranks would wait for plans in vain: they have no token."""
    refusal = answer(pods, secret.proof("join", "r", "a", "1", "r-1"), version=1)
    assert isinstance(refusal, Rejected)
    assert "run all pods from one image" in refusal.message


def test_a_pod_joins_though_more_connections_are_open_than_may_wait(pods: MemberPods, secret: PeerSecret) -> None:
    with contextlib.ExitStack() as strangers, selectors.DefaultSelector() as selector:
        pods.watch(selector)
        [accepting] = selector.get_map().values()
        silent = []
        for _ in range(80):
            silent.append(strangers.enter_context(socket.create_connection(("127.0.0.1", PORT), 60)))
            accepting.data()
        assert isinstance(answer(pods, secret.proof("join", "r", "a", "1", "r-1")), Accepted)
        assert silent[0].recv(1) == b""
        assert not select.select([silent[-1]], [], [], 0)[0], "the newest one is closed"


def test_a_connection_that_begins_a_message_for_ever_is_closed(
    pods: MemberPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few of them would keep all pods from joining."""
    opened = time.monotonic()
    with selectors.DefaultSelector() as selector, socket.create_connection(("127.0.0.1", PORT), 60) as connection:
        pods.watch(selector)
        [(accepting, _)] = selector.select(60)
        accepting.data()
        monkeypatch.setattr(time, "monotonic", lambda: opened + 9)
        connection.sendall(b"{")
        [(reading, _)] = selector.select(60)
        reading.data()
        pods.tick(opened + 9)
        pods.tick(opened + 11)
        assert connection.recv(1) == b""
