"""Peers of a TCP socket that send messages without end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from minisgl.wire.receive_limit import MAX_UNDELIVERED_BYTES, ReceiveLimit
from minisgl.wire.sockets import open_socket

WAIT_MS = 60_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def limited(context: zmq.Context[Any]) -> Iterator[tuple[Any, ReceiveLimit, str]]:
    """Socket, its limit and its address."""
    router = open_socket(context, zmq.ROUTER)
    limit = ReceiveLimit(router)
    router.bind("tcp://127.0.0.1:*")
    yield router, limit, router.getsockopt_string(zmq.LAST_ENDPOINT)
    limit.close()
    router.close()


PART = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
"""A part of a message that has more, as ZMTP 3 writes it."""


@contextlib.contextmanager
def endless_message(address: str) -> Iterator[socket.socket]:
    """Connection of a DEALER that takes PARTs. libzmq's own keeps a message until it is complete."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 60) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        properties = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
        connection.sendall(b"\x04" + bytes([6 + len(properties)]) + b"\x05READY" + properties)
        yield connection


def receive(router: Any, limit: ReceiveLimit) -> list[bytes]:
    assert router.poll(WAIT_MS)
    frames = router.recv_multipart(copy=False)
    limit.delivered(frames)
    return [frame.bytes for frame in frames[1:]]


def test_a_message_of_endless_parts_ends_its_connection_alone(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str]
) -> None:
    router, limit, address = limited
    good = open_socket(context, zmq.DEALER)
    good.connect(address)
    good.send(b"before")
    assert receive(router, limit) == [b"before"]
    with endless_message(address) as endless:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while True:
                assert sent < 16 * MAX_UNDELIVERED_BYTES, "it is never closed"
                endless.sendall(PART)
                sent += len(PART)
    good.send(b"after")
    assert receive(router, limit) == [b"after"]
    good.close()


def test_many_messages_that_are_received_do_not_reach_the_limit(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str]
) -> None:
    router, limit, address = limited
    peer = open_socket(context, zmq.DEALER)
    closed = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.connect(address)
    for _ in range(3 * MAX_UNDELIVERED_BYTES >> 22):
        peer.send(bytes(4 << 20))
        assert len(receive(router, limit)[0]) == 4 << 20
    assert not closed.poll(300)
    peer.disable_monitor()
    peer.close()


def test_a_connection_is_refused_before_the_thread_has_read_that_it_was_accepted(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = limited
    monkeypatch.setattr(ReceiveLimit, "_add", lambda *_: None)
    with open_socket(context, zmq.DEALER) as dealer:
        closed = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(address)
        dealer.send(b"greeting")
        limit.refuse(router.recv_multipart(copy=False))
        assert closed.poll(WAIT_MS)
        dealer.disable_monitor()
