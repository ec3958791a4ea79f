"""Limit on what the peers of a TCP socket make libzmq keep.

libzmq collects all parts of a message before it delivers the first one, and limits the size of each part, but not their
number. So the kernel's count of the bytes of each connection is compared with what was delivered.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import threading
import time
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl.wire.sockets import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_UNDELIVERED_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Most bytes of all connections of a socket that have arrived and were not received from it."""

_CHECK_MS: Final = 100
_FRAME_BYTES: Final = 16
"""Most bytes that a message takes in addition to its content."""
_HEARTBEAT_BYTES: Final = 64
"""Most bytes of heartbeats in a second."""
_BYTES_RECEIVED: Final = 128
"""Offset of `tcpi_bytes_received` in `struct tcp_info` of linux/tcp.h."""
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ReceiveLimit:
    """Closes connections of a bound TCP socket that send without end. A thread looks at them, because the receiver may
    be busy for seconds. It ends with `close`, which must come before that of the socket."""

    def __init__(self, limited: Any) -> None:
        self._socket = limited
        self._connections: dict[int, _Connection] = {}
        """By descriptor."""
        self._monitor = limited.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._watch, name="receive-limit", daemon=True)
        self._thread.start()

    def delivered(self, frames: list[zmq.Frame]) -> None:
        """Count a message that was received from the socket with its frames."""
        connection = self._connections.get(_descriptor(frames))
        if connection is not None:
            connection.delivered += sum(len(frame) + _FRAME_BYTES for frame in frames)

    def refuse(self, frames: list[zmq.Frame]) -> None:
        """Close the connection on which a message has arrived that nobody may send."""
        descriptor = _descriptor(frames)
        # The thread may not have read yet that it was accepted.
        with contextlib.suppress(OSError):
            (self._connections.get(descriptor) or _Connection(descriptor)).close()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._thread.join()

    def _watch(self) -> None:
        with self._monitor:
            while True:
                # Without connections there is nothing to look at.
                if self._monitor.poll(_CHECK_MS if self._connections else None):
                    event = recv_monitor_message(self._monitor)
                    match event["event"]:
                        case zmq.EVENT_MONITOR_STOPPED:
                            return
                        case zmq.EVENT_ACCEPTED:
                            self._add(event["value"])
                        case zmq.EVENT_DISCONNECTED:
                            self._connections.pop(event["value"], None)
                else:
                    self._check(time.monotonic())

    def _add(self, descriptor: int) -> None:
        try:
            self._connections[descriptor] = _Connection(descriptor)
        except OSError:
            # It was closed before its event was read.
            return

    def _check(self, now: float) -> None:
        undelivered = {connection: connection.undelivered(now) for connection in self._connections.values()}
        while sum(undelivered.values()) > MAX_UNDELIVERED_BYTES:
            largest = max(undelivered, key=lambda connection: undelivered[connection])
            logger.warning(
                "a connection was closed: %d bytes of it are no complete message, or were not read",
                undelivered[largest],
            )
            del undelivered[largest]
            largest.close()


class _Connection:
    """An accepted connection, whose descriptor belongs to libzmq."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError."""
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        self._descriptor = descriptor
        self._inode = found.st_ino
        self._last = time.monotonic()
        self.delivered = 0
        """Bytes of messages that were received, and of heartbeats."""

    def undelivered(self, now: float) -> int:
        """Bytes that have arrived and were not received as messages; 0 for a connection that was closed."""
        received = self._bytes_received()
        self.delivered = min(self.delivered + int((now - self._last) * _HEARTBEAT_BYTES), received)
        self._last = now
        return received - self.delivered

    def close(self) -> None:
        """End the connection; libzmq notices it, and releases what it keeps of it."""
        if (connection := self._open()) is not None:
            # It may have ended already.
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _bytes_received(self) -> int:
        connection = self._open()
        if connection is None:
            return 0
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
        return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])

    def _open(self) -> socket.socket | None:
        """A second descriptor of the connection; None if its own one was closed and is another file's now."""
        try:
            copy = os.dup(self._descriptor)
        except OSError:
            return None
        if os.fstat(copy).st_ino != self._inode:
            os.close(copy)
            return None
        return socket.socket(fileno=copy)


def _descriptor(frames: list[zmq.Frame]) -> int:
    """Descriptor of the connection on which a message arrived; -1 for one without. It may be closed since."""
    try:
        return int(frames[-1].get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
