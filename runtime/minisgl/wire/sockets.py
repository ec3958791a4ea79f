"""ZMQ sockets with limits, and typed messages on them. The same code for `ipc://` on one machine and `tcp://`
between hosts. Nothing here ever blocks a sender: a peer that does not read is the caller's decision."""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

MAX_MESSAGE_BYTES: Final = 16 << 20
"""libzmq drops a peer that sends more. The largest honest message is a prompt of 4 bytes a token."""

QUEUE_MESSAGES: Final = 4096
"""Messages that may wait for one peer before `send` says that it is full."""

T = TypeVar("T")


class WireError(Exception):
    """A message that cannot be understood: its sender speaks another version, or is not one of ours."""


def url_host(host: str) -> str:
    """Host as a URL contains it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def open_socket(context: zmq.Context[Any], kind: int, *, limit: int = QUEUE_MESSAGES) -> Any:
    """A socket of `kind` with our limits: bounded queues and messages, no lingering at close, and on tcp a
    heartbeat that notices a lost host within 6 s."""
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
        # An unknown peer is an error to the sender instead of a silent drop. Who connects again does so under a new
        # identity: with ROUTER_HANDOVER and heartbeats, peers that take over an identity from one that goes away
        # make libzmq 4.3.5 abort the process (stream_engine_base.cpp: !_io_error).
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


class Codec(Generic[T]):
    """Encode messages and decode those of one tagged union."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        """Raises WireError."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The last two: text that is not UTF-8, and lists nested thousands deep in a field that is not ours.
            raise WireError(f"message of {len(frame)} bytes not understood: {error}") from error


def try_send(socket: Any, frames: list[bytes]) -> bool:
    """Send without blocking. False: the peer's queue is full or the peer is gone."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
    except (zmq.Again, zmq.error.ZMQError) as error:
        if isinstance(error, zmq.Again) or error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
