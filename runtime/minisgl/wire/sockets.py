"""ZMQ sockets with limits, and typed messages on them, for `ipc://` on one machine and `tcp://` between hosts.

Sending never blocks: the caller decides what to do when a peer does not read.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Size limit; libzmq drops a peer that exceeds it. The largest valid message is a prompt with 4 bytes per token."""

QUEUE_MESSAGES: Final = 4096
"""Limit of the messages queued for one peer."""

T = TypeVar("T")


class WireError(Exception):
    """A message cannot be decoded: its sender has another wire version, or is not part of the system."""


def url_host(host: str) -> str:
    """Host as a URL contains it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def open_socket(context: zmq.Context[Any], kind: int, *, limit: int = QUEUE_MESSAGES) -> Any:
    """Open a socket of `kind` with bounded queues and messages, without linger at close, and on tcp with a heartbeat
    that detects a lost host within 6 s."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limit)
    socket.setsockopt(zmq.RCVHWM, limit)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        # Sending to an unknown peer raises instead of dropping silently. A peer that reconnects must use a new
        # identity: with ROUTER_HANDOVER and heartbeats, peers that take over an identity while its owner disconnects
        # make libzmq 4.3.5 abort the process (stream_engine_base.cpp: !_io_error).
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


class Codec(Generic[T]):
    """Encodes messages, and decodes messages of one tagged union."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: msgspec.Struct) -> bytes:
        """The message as msgpack."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        """The message in a frame. Raises WireError."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The last two are for text that is not UTF-8, and lists nested thousands deep in unknown fields.
            raise WireError(f"cannot decode a message of {len(frame)} bytes: {error}") from error


def try_send(socket: Any, frames: list[bytes]) -> bool:
    """Send without blocking. False when the queue of the peer is full or the peer has disconnected."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
    except (zmq.Again, zmq.error.ZMQError) as error:
        if isinstance(error, zmq.Again) or error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
