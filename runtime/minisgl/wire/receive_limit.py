"""Limits on what the peers of a TCP socket make libzmq keep, and on how long they may stay without a greeting.

libzmq collects all parts of a message before it delivers the first one, and limits the size of each part, but not their
number. So the kernel's count of the bytes of each connection is compared with what was delivered.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any, Final

import zmq

from minisgl.wire.sockets import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_UNDELIVERED_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Most bytes that have arrived, and were not received, of all connections of a socket without a valid greeting."""
MAX_GREETED_BYTES: Final = 32 * MAX_MESSAGE_BYTES
"""The same of each connection with a valid greeting. When an engine is lost, a frontend sends all of its requests to
another one at once. That one may be in a long step and receive nothing meanwhile: a thousand prompts of 100,000 tokens
take 400 MB."""
GREETING_SECONDS: Final = 10.0
"""Time that a connection has for a valid greeting, where one is required. It ends when nothing is left to receive: the
greeting may wait for the end of a long step."""
REFUSED_SECONDS: Final = 1.0
"""Time until a connection is closed whose greeting was refused. A message may be read when its connection has ended and
another one has the same number: that one is not closed if it sends a valid greeting until then."""
MAX_CONNECTIONS: Final = 4096
"""Most connections of a socket, if the process may open four times as many files. With more, the oldest one is closed
that has not greeted."""

_CHECK_SECONDS: Final = 0.1
_CHECKS_OF_ALL: Final = 50
"""Checks in which each connection is looked at once, whether or not it is known to have received anything."""
_FRAME_BYTES: Final = 16
"""Most bytes that a message takes in addition to its content."""
_HEARTBEAT_BYTES: Final = 64
"""Most bytes of heartbeats in a second."""
_BYTES_RECEIVED: Final = struct.Struct("128xQ")
"""`tcpi_bytes_received` in `struct tcp_info` of linux/tcp.h."""
_EVENT: Final = struct.Struct("=HI")
"""Type and value of a monitor's event; the values of ours are descriptors."""
# With both, an edge shows each arrival, even if libzmq has read everything before the edge is looked at.
_ACTIVITY: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET


class ReceiveLimit:
    """Closes connections of a bound TCP socket that send without end, or do not greet. A thread looks at them, because
    the receiver may be busy for seconds. It ends with `close`, which must come before that of the socket."""

    def __init__(self, limited: Any, greeting_required: Callable[[], bool] = lambda: False) -> None:
        """`limited`: the socket, not bound yet. `greeting_required`: whether connections must greet now; it is called
        on the thread."""
        self._socket = limited
        self._greeting_required = greeting_required
        self._lock = threading.Lock()
        """Of everything below."""
        self._monitor = limited.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._activity = select.epoll()
        self._connections: dict[int, _Connection] = {}
        """By libzmq's descriptor; those that were looked at last are at the end."""
        self._by_own: dict[int, _Connection] = {}
        """By our descriptor."""
        self._ungreeted: dict[int, _Connection] = {}
        """Those without a valid greeting by libzmq's descriptor, the oldest first."""
        self._refused: deque[_Connection] = deque()
        # Each takes two descriptors, and files must still be opened.
        self._most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._undelivered = 0
        """Bytes that were undelivered when each connection without a valid greeting was looked at last."""
        self._all_received_at = -math.inf
        """Time at which nothing was left to receive; not under the lock."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="receive-limit", daemon=True)
        self._thread.start()

    def delivered(self, frames: list[zmq.Frame]) -> None:
        """Count a message that was received from the socket with its frames."""
        with self._lock:
            if (connection := self._source(frames)) is not None:
                # The bytes of one that has ended meanwhile count for its successor until the next look at that.
                connection.delivered += sum(len(frame) + _FRAME_BYTES for frame in frames)

    def all_received(self) -> None:
        """Note that nothing is left to receive from the socket: a greeting that has arrived does not wait in it."""
        # No lock: this is called in each step, and the thread may take the old time for the new one.
        self._all_received_at = time.monotonic()

    def greeted(self, frames: list[zmq.Frame]) -> None:
        """Keep the connection on which a valid greeting has arrived."""
        with self._lock:
            if (connection := self._source(frames)) is not None and self._is_ungreeted(connection):
                self._forget_ungreeted(connection)

    def refuse(self, frames: list[zmq.Frame]) -> None:
        """Close the connection on which a greeting has arrived that is not valid, unless a valid one follows."""
        with self._lock:
            connection = self._source(frames)
            if connection is not None and connection.refused_at is None:
                connection.refused_at = time.monotonic()
                self._refused.append(connection)

    def is_refused(self, frames: list[zmq.Frame]) -> bool:
        """Whether the connection on which a message has arrived is about to be closed."""
        with self._lock:
            connection = self._source(frames)
            return connection is not None and connection.refused_at is not None and self._is_ungreeted(connection)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        for connection in list(self._connections.values()):
            self._forget(connection)
        self._activity.close()

    def _watch(self) -> None:
        while not self._ended.wait(_CHECK_SECONDS):
            with self._lock:
                self._read_events()
                self._check(time.monotonic())

    def _source(self, frames: list[zmq.Frame]) -> _Connection | None:
        """The connection that has the descriptor on which a message arrived."""
        self._read_events()
        try:
            return self._connections.get(int(frames[-1].get(zmq.SRCFD)))
        except zmq.ZMQError:
            return None

    def _read_events(self) -> None:
        """Take over which connections are open. Afterwards each of ours is the one that libzmq had accepted, since it
        reports the end of a connection before it closes the descriptor."""
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            kind, number = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if (connection := self._connections.get(number)) is not None:
                self._forget(connection)
            if kind == zmq.EVENT_ACCEPTED:
                self._add(number)

    def _add(self, number: int) -> None:
        try:
            connection = _Connection(number, time.monotonic())
        except OSError as error:
            # It may have ended before its event was read.
            logger.debug("a connection is not watched: %s", error)
            return
        self._connections[number] = self._by_own[connection.fileno()] = self._ungreeted[number] = connection
        self._activity.register(connection.fileno(), _ACTIVITY)
        if len(self._connections) > self._most:
            self._end(next(iter(self._ungreeted.values())))

    def _forget(self, connection: _Connection) -> None:
        self._activity.unregister(connection.fileno())
        del self._connections[connection.number], self._by_own[connection.fileno()]
        if self._is_ungreeted(connection):
            self._forget_ungreeted(connection)
        connection.close()

    def _forget_ungreeted(self, connection: _Connection) -> None:
        self._undelivered -= connection.undelivered
        del self._ungreeted[connection.number]

    def _end(self, connection: _Connection) -> None:
        connection.shut_down()
        self._forget(connection)

    def _is_ungreeted(self, connection: _Connection) -> bool:
        return self._ungreeted.get(connection.number) is connection

    def _check(self, now: float) -> None:
        self._look(now, [self._by_own[descriptor] for descriptor, _ in self._activity.poll(0)])
        some = -(-len(self._connections) // _CHECKS_OF_ALL)
        for connection in list(islice(self._connections.values(), some)):
            del self._connections[connection.number]
            self._connections[connection.number] = connection
            self._look(now, [connection])
        if self._undelivered > MAX_UNDELIVERED_BYTES:
            # Messages may have been delivered since.
            self._look(now, self._ungreeted.values())
        while self._undelivered > MAX_UNDELIVERED_BYTES:
            self._end_sender(max(self._ungreeted.values(), key=lambda connection: connection.undelivered))
        self._end_ungreeted(now)

    def _look(self, now: float, connections: Iterable[_Connection]) -> None:
        for connection in connections:
            grown = connection.look(now)
            if self._is_ungreeted(connection):
                self._undelivered += grown
            elif connection.undelivered > MAX_GREETED_BYTES:
                self._end_sender(connection)

    def _end_sender(self, connection: _Connection) -> None:
        logger.warning(
            "a connection was closed: %d bytes of it are no complete message, or were not read", connection.undelivered
        )
        self._end(connection)

    def _end_ungreeted(self, now: float) -> None:
        while self._refused and now - (self._refused[0].refused_at or 0.0) >= REFUSED_SECONDS:
            if self._is_ungreeted(refused := self._refused.popleft()):
                self._end(refused)
        since = self._all_received_at - GREETING_SECONDS
        late = takewhile(lambda connection: connection.accepted_at <= since, self._ungreeted.values())
        first = next(late, None)
        if first is None or not self._greeting_required():
            return
        ended = [first, *late]
        for connection in ended:
            self._end(connection)
        logger.warning("%d connections were closed: they did not greet within %g s", len(ended), GREETING_SECONDS)


class _Connection:
    """An accepted connection by a descriptor of our own, which no other connection can have instead."""

    def __init__(self, number: int, now: float) -> None:
        """`number`: libzmq's descriptor. Raises OSError."""
        self.number = number
        self.accepted_at = now
        self.refused_at: float | None = None
        self.delivered = 0
        """Bytes of messages that were received."""
        self.undelivered = 0
        """Bytes that had arrived by the last look and were not received as messages."""
        self._others = 0.0
        """Bytes that need not be delivered, such as heartbeats."""
        self._looked_at = now
        copy = os.dup(number)
        try:
            self._socket = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def look(self, now: float) -> int:
        """Update `undelivered`; returns by how much it has grown."""
        before = self.undelivered
        self._others += (now - self._looked_at) * _HEARTBEAT_BYTES
        self._looked_at = now
        left = self._bytes_received() - self.delivered - self._others
        # Less than none: the allowances were too high.
        self._others += min(left, 0.0)
        self.undelivered = int(max(left, 0.0))
        return self.undelivered - before

    def shut_down(self) -> None:
        """End the connection; libzmq notices it, and releases what it keeps of it."""
        # It may have ended already. A reset reaches also a peer that waits for room to send.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _bytes_received(self) -> int:
        """0 where the kernel does not count them, as Linux before 4.1."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0]) if len(info) == _BYTES_RECEIVED.size else 0
