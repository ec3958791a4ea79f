"""A worker that greets a scheduler whose pods share a secret."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from minisgl.router.link import Link
from minisgl.scheduler.clients import Clients
from minisgl.wire import receive_limit
from minisgl.wire.messages import WIRE_VERSION, FromScheduler, Hello, ModelCard, Welcome
from minisgl.wire.peer_secret import PeerSecret
from minisgl.wire.sockets import Codec
from support.launcher.required_secret import required_secret
from support.messages import submit_of

CARD = ModelCard(name="m", revision="", max_model_len=8, vocab_size=8, eos_token_ids=(), tokenizer_hashes={})


@pytest.fixture
def secret(tmp_path: Path) -> PeerSecret:
    return required_secret(tmp_path)


@pytest.fixture
def clients(secret: PeerSecret) -> Iterator[Clients]:
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(context, "tcp://127.0.0.1:*", CARD, (0, 0), secret=secret)
    yield clients
    clients.close()
    context.destroy(linger=0)


@pytest.fixture
def connect(clients: Clients) -> Iterator[Callable[[], Link]]:
    context: zmq.Context[Any] = zmq.Context()
    with contextlib.ExitStack() as links:

        def connect() -> Link:
            link = Link(context, clients.address)
            links.callback(link.close)
            return link

        yield connect
    context.destroy(linger=0)


@pytest.fixture
def link(connect: Callable[[], Link]) -> Link:
    return connect()


def is_welcome(clients: Clients, link: Link, proof: str) -> bool:
    """Whether the greeting with this proof is answered; False: its connection was closed."""
    link.send(Hello(WIRE_VERSION, "worker", proof))
    while True:
        assert not list(clients.receive(10))
        poller = zmq.Poller()
        link.register(poller)
        frames = link.receive(dict(poller.poll(10)))
        if frames:
            return isinstance(Codec[FromScheduler](FromScheduler).decode(frames[0]), Welcome)
        if link.take_lost():
            return False


def test_a_worker_that_knows_the_secret_is_welcome(clients: Clients, link: Link, secret: PeerSecret) -> None:
    assert is_welcome(clients, link, secret.proof("scheduler", link.identity.hex()))


def test_a_greeting_without_a_proof_is_closed(clients: Clients, link: Link) -> None:
    assert not is_welcome(clients, link, "")


@pytest.mark.parametrize("field", ["client", "proof"])
def test_a_greeting_of_any_length_is_closed_unread(
    clients: Clients, link: Link, secret: PeerSecret, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(PeerSecret, "refuses", lambda *_: pytest.fail("it was looked at"))
    for size in (3 << 10, 14 << 20):
        fields = {"client": "worker", "proof": secret.proof("scheduler", link.identity.hex())} | {field: "a " * size}
        link.send(Hello(WIRE_VERSION, **fields))
    while not link.take_lost():
        assert not list(clients.receive(10))


def test_the_greetings_of_a_connection_are_checked_until_one_is_refused(
    clients: Clients, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def refuses(_: PeerSecret, proof: str, *greeting: str) -> bool:
        checked.append(proof)
        return True

    monkeypatch.setattr(PeerSecret, "refuses", refuses)
    for _ in range(100):
        link.send(Hello(WIRE_VERSION, "worker", "wrong"))
    while not link.take_lost():
        assert not list(clients.receive(10))
    assert checked == ["wrong"]


def test_a_connection_without_a_greeting_is_closed_and_one_with_it_stays(
    clients: Clients, link: Link, secret: PeerSecret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limit, "GREETING_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", int(clients.address.rpartition(":")[2])), 60) as silent:
        assert is_welcome(clients, link, secret.proof("scheduler", link.identity.hex()))
        while not select.select([silent], [], [], 0)[0] or silent.recv(4096):
            assert not list(clients.receive(10))
    assert not link.take_lost()


def test_a_proof_serves_the_identity_that_it_names_alone(clients: Clients, link: Link, secret: PeerSecret) -> None:
    proof = secret.proof("scheduler", link.identity.hex())
    link.reconnect()
    assert not is_welcome(clients, link, proof)


@pytest.mark.parametrize("is_required", [True, False])
def test_many_requests_of_a_frontend_may_wait_for_a_busy_engine(
    clients: Clients,
    connect: Callable[[], Link],
    secret: PeerSecret,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_required: bool,
) -> None:
    monkeypatch.setattr(receive_limit, "MAX_UNDELIVERED_BYTES", 1 << 20)
    if not is_required:
        (tmp_path / "required").unlink()
    link, stranger = connect(), connect()
    assert is_welcome(clients, link, secret.proof("scheduler", link.identity.hex()) if is_required else "")
    request = submit_of(id=bytes(16), prompt=bytes(2 << 20), max_tokens=1, seed=0)
    for _ in range(4):
        link.send(request)
    stranger.send(request)
    while not stranger.take_lost():
        assert not link.take_lost()
    received = 0
    while received < 4:
        assert not link.take_lost()
        received += len(list(clients.receive(10)))


def test_until_the_secret_is_required_all_are_welcome(clients: Clients, link: Link, tmp_path: Path) -> None:
    (tmp_path / "required").unlink()
    assert is_welcome(clients, link, "")
