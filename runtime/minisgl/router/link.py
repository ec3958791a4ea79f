"""The connection of a worker to one peer."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl.wire.sockets import open_socket, try_send

MAX_FRAMES_PER_CYCLE: Final = 64
"""Most frames that are taken from one socket before the others get their turn, which is after a millisecond or two."""
MAX_BACKLOG: Final = 1 << 16
"""Most messages that wait for a peer that does not read; with more it counts as lost."""

_CONNECT_TIMEOUT_MS: Final = 2000
"""The kernel would try for two minutes to reach an address whose packets are dropped, with growing pauses."""


class Link:
    """A DEALER socket that is connected to one peer, with the messages that wait to be sent there."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._context = context
        self._address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._backlog: deque[bytes] = deque()
        self._lost = False
        self._socket: Any = None
        self.identity = b""
        """Of this connection."""
        self.reconnect()

    def reconnect(self) -> None:
        """Drop the connection and all waiting messages, and connect under a new identity: no message for the old peer
        can reach the next one."""
        self.close()
        self._socket = open_socket(self._context, zmq.DEALER)
        self.identity = b"t" + secrets.token_bytes(16)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def send(self, message: msgspec.Struct) -> None:
        self._backlog.append(self._encoder.encode(message))
        self.flush()

    def flush(self) -> None:
        while self._backlog and try_send(self._socket, [self._backlog[0]]):
            self._backlog.popleft()
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.clear()
            self._lost = True

    def receive(self, ready: Mapping[Any, int]) -> list[bytes]:
        """Return the frames that have arrived, if `ready` reports the socket as readable."""
        frames: list[bytes] = []
        if not ready.get(self._socket, 0) & zmq.POLLIN:
            return frames
        while len(frames) < MAX_FRAMES_PER_CYCLE:
            try:
                frames.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return frames

    def receive_rest(self) -> list[bytes]:
        """Return all frames that a lost peer had sent: they may contain the ends of answers."""
        frames: list[bytes] = []
        while more := self.receive({self._socket: zmq.POLLIN}):
            frames += more
        return frames

    def take_lost(self) -> bool:
        """Return whether the peer was lost since the last call."""
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            self._lost |= recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        lost, self._lost = self._lost, False
        return lost

    def close(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._socket = None
        self._backlog.clear()
        self._lost = False
