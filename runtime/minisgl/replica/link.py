"""One end of a link between the launchers of two pods."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from minisgl.replica.messages import FromLeader, Ping, ToLeader

PING_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
"""Silence after which a link counts as lost: a machine that has failed closes no connection."""

_MAX_LINE: Final = 256 << 10
_READ_BYTES: Final = 1 << 16

Message = TypeVar("Message")


class LinkClosed(Exception):
    """The connection cannot be used any more; the message gives the cause."""


class Link(Generic[Message]):
    """Receives messages of one type. Nothing blocks: a message that the socket does not take at once closes the link,
    because messages are few and small."""

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Message]) -> None:
        """`connection` is connected and belongs to the link from now on. Raises OSError when it has just closed."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.local_host = _host(connection.getsockname()[0])
        self.peer_host = _host(connection.getpeername()[0])
        self._decoder = decoder
        self._rest = b""
        self.opened_at = self._received_at = time.monotonic()
        self._next_ping = 0.0
        self._selector: selectors.BaseSelector | None = None

    def send(self, message: ToLeader | FromLeader) -> None:
        """Raises LinkClosed."""
        try:
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise LinkClosed(f"cannot send: {error.strerror or error}") from error

    def receive(self) -> Iterator[Message]:
        """Messages that have arrived. Raises LinkClosed at the end of the stream and at an invalid line, after the
        messages before it."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosed(f"cannot receive: {error.strerror or error}") from error
        if not data:
            raise LinkClosed("the peer closed the connection")
        self._received_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise LinkClosed(f"a line is longer than {_MAX_LINE} bytes")
        for line in lines:
            try:
                yield self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise LinkClosed(f"invalid message: {error}") from error

    def watch(
        self,
        selector: selectors.BaseSelector,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Have `selector` call `on_message` for each message. Once the link cannot be used any more, or `on_message`
        has raised LinkClosed, `on_closed` is called with the cause; it must call `close`."""
        self._selector, self._on_message, self._on_closed = selector, on_message, on_closed
        selector.register(self.socket, selectors.EVENT_READ, self._read)

    def tick(self, now: float, *, ping: bool = True) -> None:
        """Send a ping when one is due, and notice silence of the peer. Call it every second or so."""
        try:
            if now - self._received_at > SILENCE_SECONDS:
                raise LinkClosed(f"no message for {SILENCE_SECONDS:g} s")
            if ping and now >= self._next_ping:
                self._next_ping = now + PING_SECONDS
                self.send(Ping())
        except LinkClosed as error:
            self._on_closed(str(error))

    def close(self) -> None:
        # A closed selector has no map.
        if self._selector is not None and self.socket in (self._selector.get_map() or ()):
            self._selector.unregister(self.socket)
        self.socket.close()

    def _read(self) -> None:
        try:
            for message in self.receive():
                self._on_message(message)
                if self.socket.fileno() < 0:
                    return
        except LinkClosed as error:
            self._on_closed(str(error))


def _host(address: str) -> str:
    """Address without the IPv6 prefix that an IPv4 peer has on a dual-stack socket."""
    return address.removeprefix("::ffff:") if "." in address else address
