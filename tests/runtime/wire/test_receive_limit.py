"""Peers of a TCP socket that send messages without end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from minisgl.wire import receive_limit
from minisgl.wire.receive_limit import MAX_UNDELIVERED_BYTES, ReceiveLimit
from minisgl.wire.sockets import open_socket

WAIT_MS = 60_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def bound(context: zmq.Context[Any], greeting_required: Callable[[], bool]) -> Iterator[tuple[Any, ReceiveLimit, str]]:
    """Socket, its limit and its address."""
    router = open_socket(context, zmq.ROUTER)
    limit = ReceiveLimit(router, greeting_required)
    router.bind("tcp://127.0.0.1:*")
    yield router, limit, router.getsockopt_string(zmq.LAST_ENDPOINT)
    limit.close()
    router.close()


@pytest.fixture
def limited(context: zmq.Context[Any]) -> Iterator[tuple[Any, ReceiveLimit, str]]:
    yield from bound(context, lambda: False)


def raw_connection(address: str) -> socket.socket:
    return socket.create_connection(endpoint(address), 60)


def endpoint(address: str) -> tuple[str, int]:
    return "127.0.0.1", int(address.rpartition(":")[2])


def shake_hands(connection: socket.socket) -> None:
    """Begin ZMTP 3 as a DEALER does: no message may come before the peer is ready."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    properties = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
    connection.sendall(b"\x04" + bytes([6 + len(properties)]) + b"\x05READY" + properties)
    # The last byte is the length of READY.
    receive_exactly(connection, receive_exactly(connection, 66)[65])


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        assert more, "it was closed"
        received += more
    return received


def is_closed(connection: socket.socket) -> bool:
    """Wait for the peer's end of a connection, behind what it has sent."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def is_open(connection: socket.socket) -> bool:
    while select.select([connection], [], [], 0)[0]:
        if not connection.recv(4096):
            return False
    return True


@contextlib.contextmanager
def greeting(context: zmq.Context[Any], address: str) -> Iterator[tuple[Any, Any]]:
    """A client that has sent one message, and its monitor of the connection's end."""
    with open_socket(context, zmq.DEALER) as dealer:
        closed = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(address)
        dealer.send(b"greeting")
        yield dealer, closed
        dealer.disable_monitor()


def take(router: Any) -> list[zmq.Frame]:
    """The next message; none of them is counted."""
    assert router.poll(WAIT_MS)
    frames: list[zmq.Frame] = router.recv_multipart(copy=False)
    return frames


PART = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
"""A part of a message that has more, as ZMTP 3 writes it."""


@contextlib.contextmanager
def endless_message(address: str) -> Iterator[socket.socket]:
    """Connection of a DEALER that takes PARTs. libzmq's own keeps a message until it is complete."""
    with raw_connection(address) as connection:
        shake_hands(connection)
        yield connection


def send_until_closed(endless: socket.socket) -> None:
    sent = 0
    with contextlib.suppress(ConnectionError):
        while True:
            assert sent < 16 * MAX_UNDELIVERED_BYTES, "it is never closed"
            endless.sendall(PART)
            sent += len(PART)


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
        send_until_closed(endless)
    good.send(b"after")
    assert receive(router, limit) == [b"after"]
    good.close()


def send_uncounted(dealer: Any, router: Any, mebibytes: int) -> None:
    """Have bytes arrive, and leave them undelivered for the limit."""
    for _ in range(mebibytes):
        dealer.send(bytes(1 << 20))
        take(router)


def test_a_connection_that_has_greeted_may_send_more_than_all_others(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frontend whose requests come from a lost engine, while a step runs."""
    router, limit, address = limited
    monkeypatch.setattr(receive_limit, "MAX_UNDELIVERED_BYTES", 1 << 20)
    with greeting(context, address) as (dealer, closed):
        limit.greeted(take(router))
        send_uncounted(dealer, router, 4)
        with endless_message(address) as endless:
            send_until_closed(endless)
        assert not closed.poll(0)


def test_a_connection_that_has_greeted_has_a_limit_of_its_own(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = limited
    monkeypatch.setattr(receive_limit, "MAX_GREETED_BYTES", 5 << 19)
    with greeting(context, address) as (first, first_closed), greeting(context, address) as (second, second_closed):
        for _ in range(2):
            limit.greeted(take(router))
        send_uncounted(first, router, 2)
        send_uncounted(second, router, 3)
        assert second_closed.poll(WAIT_MS)
        assert not first_closed.poll(0)


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


def test_connections_that_come_and_go_do_not_keep_others_from_being_looked_at(
    limited: tuple[Any, ReceiveLimit, str],
) -> None:
    _, _, address = limited
    with endless_message(address) as endless, contextlib.suppress(ConnectionError):
        for _ in range(16 * MAX_UNDELIVERED_BYTES // len(PART)):
            endless.sendall(PART)
            with raw_connection(address) as connection:
                # No closed connection waits for late packets.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pytest.fail("it is never closed")


def test_a_message_that_is_delivered_while_its_connection_is_looked_at_counts(
    context: zmq.Context[Any], limited: tuple[Any, ReceiveLimit, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = limited
    looked, delivered = threading.Event(), threading.Event()
    real = socket.socket.getsockopt

    def slow(self: socket.socket, *arguments: int) -> Any:
        answer = real(self, *arguments)
        looked.set()
        # It may have to wait for the end of the look.
        delivered.wait(0.1)
        return answer

    with open_socket(context, zmq.DEALER) as dealer:
        closed = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(address)
        dealer.send(b"first")
        receive(router, limit)
        monkeypatch.setattr(socket.socket, "getsockopt", slow)
        for _ in range(2 * MAX_UNDELIVERED_BYTES >> 22):
            delivered.clear()
            looked.clear()
            assert looked.wait(60)
            dealer.send(bytes(4 << 20))
            receive(router, limit)
            delivered.set()
        monkeypatch.undo()
        assert not closed.poll(300)
        dealer.disable_monitor()


@pytest.fixture
def required(context: zmq.Context[Any]) -> Iterator[tuple[Any, ReceiveLimit, str]]:
    """As `limited`, with connections that must greet."""
    yield from bound(context, lambda: True)


def test_a_silent_connection_is_closed_where_a_greeting_is_required(
    required: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = required
    monkeypatch.setattr(receive_limit, "GREETING_SECONDS", 1.0)
    with raw_connection(address) as silent, greeting(context, address) as (_, closed):
        limit.greeted(take(router))
        while is_open(silent):
            limit.all_received()
        assert not closed.poll(0)


def test_a_greeting_may_wait_until_the_receiver_has_time(
    required: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = required
    monkeypatch.setattr(receive_limit, "GREETING_SECONDS", 0.0)
    with greeting(context, address) as (_, waiting):
        unread = take(router)
        with greeting(context, address) as (_, refused):
            # The watch has looked at all connections when it has closed this one.
            limit.refuse(take(router))
            assert refused.poll(WAIT_MS)
        limit.greeted(unread)
        with raw_connection(address) as silent:
            while is_open(silent):
                limit.all_received()
        assert not waiting.poll(0)


def test_a_silent_connection_stays_where_no_greeting_is_required(
    limited: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = limited
    monkeypatch.setattr(receive_limit, "GREETING_SECONDS", 0.0)
    monkeypatch.setattr(receive_limit, "REFUSED_SECONDS", 0.3)
    with raw_connection(address) as silent, greeting(context, address) as (_, refused):
        limit.refuse(take(router))
        while not refused.poll(10):
            limit.all_received()
        assert is_open(silent)


def test_a_greeting_that_is_refused_ends_its_connection_unless_a_valid_one_follows(
    limited: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any]
) -> None:
    router, limit, address = limited
    with greeting(context, address) as (dealer, closed):
        limit.refuse(take(router))
        dealer.send(b"valid")
        limit.greeted(take(router))
        with greeting(context, address) as (_, other):
            frames = take(router)
            limit.refuse(frames)
            assert limit.is_refused(frames)
            assert other.poll(WAIT_MS)
        assert not closed.poll(0)


def test_a_refused_greeting_of_a_connection_that_has_ended_does_not_end_its_successor(
    limited: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any]
) -> None:
    router, limit, address = limited
    with contextlib.ExitStack() as stack:
        successor = stack.enter_context(socket.socket())
        with greeting(context, address):
            late = take(router)
        number = late[-1].get(zmq.SRCFD)
        for _ in range(2):
            occupied = -1
            while occupied != number:
                # All numbers below, and that of the connection once libzmq has closed it.
                occupied = os.open(os.devnull, os.O_RDONLY)
                stack.callback(os.close, occupied) if occupied < number else os.close(occupied)
            # Takes over that the connection has ended, whose second descriptor is free then, too.
            assert not limit.is_refused(late)
        successor.connect(endpoint(address))
        shake_hands(successor)
        successor.sendall(b"\x00\x05hello")
        greeted = take(router)
        assert greeted[-1].get(zmq.SRCFD) == number
        limit.refuse(late)
        limit.greeted(greeted)
        with greeting(context, address) as (_, other):
            limit.refuse(take(router))
            assert other.poll(WAIT_MS)
        assert is_open(successor)


def test_a_kernel_that_does_not_count_bytes_does_not_end_the_watch(
    limited: tuple[Any, ReceiveLimit, str], context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, limit, address = limited
    real: Any = socket.socket.getsockopt

    def short(*arguments: Any) -> Any:
        return real(*arguments)[:104]

    monkeypatch.setattr(socket.socket, "getsockopt", short)
    for _ in range(2):
        with greeting(context, address) as (_, closed):
            limit.refuse(take(router))
            assert closed.poll(WAIT_MS)


def test_connections_that_have_received_nothing_are_seldom_looked_at(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    checks: list[None] = []
    real = socket.socket.getsockopt

    def counting(*arguments: Any) -> Any:
        looks.append(None)
        return real(*arguments)

    def check() -> bool:
        checks.append(None)
        return False

    monkeypatch.setattr(receive_limit, "GREETING_SECONDS", 0.0)
    monkeypatch.setattr(receive_limit, "_CHECK_SECONDS", 0.002)
    with contextlib.contextmanager(bound)(context, check) as (_, limit, address), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw_connection(address)) for _ in range(200)]
        while len(checks) < 10:
            limit.all_received()
            assert is_open(idle[0])
        monkeypatch.setattr(socket.socket, "getsockopt", counting)
        begun, looked = len(checks), len(looks)
        while len(checks) < begun + 100:
            assert is_open(idle[0])
        assert (len(looks) - looked) / (len(checks) - begun) < len(idle) / 10


def test_too_many_connections_end_those_that_do_not_greet(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limit, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        router, limit, address = stack.enter_context(contextlib.contextmanager(bound)(context, lambda: False))
        _, closed = stack.enter_context(greeting(context, address))
        limit.greeted(take(router))
        silent = [stack.enter_context(raw_connection(address)) for _ in range(3)]
        assert is_closed(silent[0])
        assert is_open(silent[1]) and is_open(silent[2])
        assert not closed.poll(0)
