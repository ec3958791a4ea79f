"""Fake peer of a link between launchers."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec

from minisgl.replica.link import PING_SECONDS, Link, LinkClosed
from minisgl.replica.messages import FromLeader, Ping, ToLeader, from_leader, to_leader

T = TypeVar("T")


class LinkPeer(Generic[T]):
    """Receives all messages but pings, in order. Sends pings as often as a launcher, unless it is `silent`."""

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Any], *, silent: bool = False) -> None:
        self._link: Link[T] = Link(connection, decoder)
        self._messages: list[T] = []
        self._closed = threading.Event()
        if not silent:
            threading.Thread(target=self._ping, daemon=True).start()

    def send(self, message: ToLeader | FromLeader) -> None:
        self._link.send(message)

    def send_bytes(self, data: bytes) -> None:
        self._link.socket.sendall(data)

    def receive(self, kind: type[Any], seconds: float = 60.0) -> Any:
        """Return the next message, which must be of this kind."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.socket, selectors.EVENT_READ)
            while not self._messages:
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind.__name__} was received"
                if selector.select(left):
                    self._messages += [each for each in self._link.receive() if not isinstance(each, Ping)]
        message = self._messages.pop(0)
        assert isinstance(message, kind), message
        return message

    def wait_for_end(self, seconds: float = 30.0) -> None:
        """Wait until the peer closes the link."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.socket, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                try:
                    if selector.select(left):
                        list(self._link.receive())
                except LinkClosed:
                    return
        raise AssertionError("the link was not closed")

    def close(self) -> None:
        self._closed.set()
        self._link.close()

    def _ping(self) -> None:
        with contextlib.suppress(LinkClosed):
            while not self._closed.wait(PING_SECONDS):
                self._link.send(Ping())


def dial_leader(port: int, seconds: float = 60.0, *, silent: bool = False) -> LinkPeer[FromLeader]:
    """Connect as a member pod; waits until the leader listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return LinkPeer(socket.create_connection(("127.0.0.1", port), 5), from_leader, silent=silent)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the leader does not listen"
            time.sleep(0.02)


def accept_member(listener: socket.socket, seconds: float = 60.0) -> LinkPeer[ToLeader]:
    """Accept a link as the leader."""
    listener.settimeout(seconds)
    accepted, _ = listener.accept()
    return LinkPeer(accepted, to_leader)
