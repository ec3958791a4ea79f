"""Hostile clients: invalid frames, peers that reconnect or do not read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.config import EngineConfig
from minisgl.scheduler import clients as clients_module
from minisgl.scheduler.clients import Clients
from minisgl.scheduler.process import SchedulerProcessConfig, run
from minisgl.scheduler.server import serve
from minisgl.wire.messages import WIRE_VERSION, Ack, Failed, FromScheduler, Hello, ModelCard, Submit, Welcome
from minisgl.wire.sockets import Codec, open_socket
from support.messages import submit_of
from support.scheduling import VOCAB, Harness

CARD = ModelCard(name="m", revision="", max_model_len=64, vocab_size=VOCAB, eos_token_ids=(), tokenizer_hashes={})
CODEC: Codec[FromScheduler] = Codec(FromScheduler)

FRAMES_THAT_BREAK_DECODERS = [
    pytest.param(b"\x83\xa4type\xa5hello\xa7version\x01\xa6client\xa2\xff\xfe", id="text that is not UTF-8"),
    pytest.param(
        b"\x84\xa4type\xa5hello\xa1x" + b"\x91" * 100_000 + b"\x01\xa7version\x01\xa6client\xa1a",
        id="lists nested deep in an unknown field",
    ),
]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def clients(context: zmq.Context[Any], tmp_path: Path) -> Iterator[Clients]:
    clients = Clients(context, f"ipc://{tmp_path}/s", CARD, (0, 0))
    yield clients
    clients.close()


@contextmanager
def serving(clients: Clients, harness: Harness) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(harness.loop, clients, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def connect(context: zmq.Context[Any], clients: Clients) -> Any:
    socket = open_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(clients.address)
    return socket


def say(socket: Any, *messages: msgspec.Struct) -> None:
    for message in messages:
        socket.send(CODEC.encode(message))


def expect(socket: Any, *kinds: type) -> Any:
    """The next message of one of `kinds`."""
    while True:
        message = CODEC.decode(socket.recv())
        if isinstance(message, kinds):
            return message


def submit(number: int, max_tokens: int = 3, **options: Any) -> Submit:
    prompt = np.array([number], "<i4").tobytes()
    return submit_of(id=number.to_bytes(16, "big"), prompt=prompt, max_tokens=max_tokens, seed=0, **options)


@pytest.mark.parametrize("frame", FRAMES_THAT_BREAK_DECODERS)
def test_an_undecodable_frame_drops_only_its_sender(context: zmq.Context[Any], clients: Clients, frame: bytes) -> None:
    """Decoders raise more than their own errors; none of these may end the process."""
    with serving(clients, Harness()):
        vandal, other = connect(context, clients), connect(context, clients)
        say(vandal, Hello(WIRE_VERSION, "vandal"))
        vandal.send(frame)
        failed = expect(vandal, Failed)
        assert (failed.id, failed.code) == (b"", "invalid_message")
        say(other, Hello(WIRE_VERSION, "other"), submit(1))
        assert expect(other, Ack, Failed) == Ack(submit(1).id)


def test_hellos_of_another_version_never_block(context: zmq.Context[Any], clients: Clients) -> None:
    """A peer that sends HELLO forever and reads no answer: its queue fills up without blocking the scheduler."""
    peer = connect(context, clients)
    hello = CODEC.encode(Hello(WIRE_VERSION + 7, "x" * 100))
    for _ in range(20_000):
        peer.send(hello)
        assert list(clients.receive(1)) == []
        clients.flush()
    assert expect(peer, Failed).code == "wire_version"


def test_a_restarted_client_may_reuse_request_ids(context: zmq.Context[Any], clients: Clients) -> None:
    """Its old requests are aborted before its new ones are processed, even in one batch."""
    first = Hello(WIRE_VERSION, "first")
    peer = connect(context, clients)
    say(peer, first, submit(1, 60, ignore_eos=True), first, submit(1, 60, ignore_eos=True))
    while not clients._socket.poll(60_000):
        pass
    with serving(clients, Harness()):
        answers = [expect(peer, Welcome, Ack, Failed) for _ in range(4)]
    assert [type(answer) for answer in answers] == [Welcome, Ack, Welcome, Ack]


def test_a_dropped_client_receives_the_reason(
    context: zmq.Context[Any], clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read again later, and must not wait for answers that are never sent."""
    monkeypatch.setattr(clients_module, "MAX_BACKLOG_BYTES", 1000)
    lazy = connect(context, clients)
    say(lazy, Hello(WIRE_VERSION, "lazy"))
    assert list(clients.receive(60_000)) == []
    gone: list[int] = []
    while not gone:
        clients.send(0, Failed(bytes(16), "code", "x" * 100_000))
        gone = clients.take_disconnected()
    last = None
    while last is None or last.id:
        clients.flush()
        last = expect(lazy, Failed)
    assert last.code == "client_dropped"
    clients.flush()
    assert not clients._dropped


def test_an_address_that_cannot_be_bound_raises(tmp_path: Path) -> None:
    """The error is raised instead of waiting for a socket that is never closed."""
    config = SchedulerProcessConfig(
        engine=EngineConfig(model=""), address=f"ipc://{tmp_path}/no/such/folder", model_name="m"
    )
    with pytest.raises(zmq.ZMQError):
        run(config, lambda: Harness().engine, ready=lambda *_: None, stop=threading.Event())


def test_an_identity_is_not_taken_over_while_its_peer_is_connected(context: zmq.Context[Any], clients: Clients) -> None:
    """Taking over identities makes libzmq abort the process when peers connect and disconnect."""
    first, second, third = (connect(context, clients) for _ in range(3))
    for socket in (first, second):
        socket.disconnect(clients.address)
        socket.setsockopt(zmq.IDENTITY, b"the same")
    first.connect(clients.address)
    say(first, Hello(WIRE_VERSION, "first"))
    assert list(clients.receive(60_000)) == []
    monitor = second.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    second.connect(clients.address)
    assert monitor.poll(60_000)
    say(third, Hello(WIRE_VERSION, "third"))
    while 1 not in clients._by_number:
        assert list(clients.receive(60_000)) == []
    clients.send(0, Ack(bytes(16)))
    assert expect(first, Ack) == Ack(bytes(16))
    second.disable_monitor()
