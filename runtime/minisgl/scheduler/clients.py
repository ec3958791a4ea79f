"""The clients of a scheduler: one ROUTER socket, and for each client a queue that never blocks the step loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import numpy as np
import zmq
from numpy.typing import NDArray

from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import (
    WIRE_VERSION,
    Failed,
    FirstTokenWait,
    FromScheduler,
    Hello,
    ModelCard,
    TokenLogprobs,
    Tokens,
    ToScheduler,
    Welcome,
)
from minisgl.wire.sockets import Codec, WireError, open_socket

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BACKLOG_BYTES: Final = 64 << 20
"""What a client that does not read may owe us before it is dropped."""
MAX_MESSAGES_PER_POLL: Final = 64
"""Taken in between two steps, so that a burst of requests cannot stall those that run."""


class _Client:
    def __init__(self, identity: bytes, number: int, name: str) -> None:
        self.identity = identity
        self.number = number
        self.name = name
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0


class Clients:
    """Clients are numbered in the order of their first HELLO; a number is never used again."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        model: ModelCard,
        epoch: tuple[int, int],
        *,
        replica: str = "",
        revision: str = "",
    ) -> None:
        """Bind `address`; everything else is for the answer to a HELLO, see `Welcome`."""
        self._socket = open_socket(context, zmq.ROUTER)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            # A socket that stays open would hold up the end of its context, and with it the process, for ever.
            self._socket.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._codec: Codec[ToScheduler] = Codec(ToScheduler)
        self._welcome = Welcome(version=WIRE_VERSION, epoch=epoch, model=model, replica=replica, revision=revision)
        self._by_identity: dict[bytes, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._expelled: dict[bytes, _Client] = {}
        """By identity; their backlog is the message that tells them so, until it can be sent."""
        self._next_number = 0
        self._gone: list[int] = []

    def receive(self, wait_ms: int) -> Iterator[tuple[int, ToScheduler]]:
        """Messages of greeted clients, with the client's number; waits for the first at most `wait_ms`."""
        if wait_ms and not self._socket.poll(wait_ms):
            return
        for _ in range(MAX_MESSAGES_PER_POLL):
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                message = self._codec.decode(frames[0] if len(frames) == 1 else b"")
            except WireError as error:
                self._expel(identity, identity.hex(), "invalid_message", str(error))
                continue
            if isinstance(message, Hello):
                self._greet(identity, message)
            elif (client := self._by_identity.get(identity)) is not None:
                yield client.number, message

    def take_gone(self) -> list[int]:
        """Numbers of clients that went away since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def send(self, number: int, message: FromScheduler) -> None:
        client = self._by_number.get(number)
        if client is not None:
            self._send(client, self._codec.encode(message))

    def broadcast(self, message: FromScheduler) -> None:
        frame = self._codec.encode(message)
        for client in list(self._by_number.values()):
            self._send(client, frame)

    def send_step(self, output: StepOutput, now: float) -> None:
        """One message to each client that has rows in the step. `now`: by the scheduler's clock."""
        for failure in output.failures:
            self.send(failure.client, Failed(failure.id, failure.code, failure.message))
        for number, prompt in output.prompt_logprobs:
            self.send(number, prompt)
        if not len(output.client):
            return
        first = int(output.client[0])
        waits = {row: FirstTokenWait(queued, now - admitted) for row, (queued, admitted) in output.started.items()}
        if np.count_nonzero(output.client == first) == len(output.client):
            self.send(first, _tokens(output, slice(None), output.logprobs, waits))
            return
        for number in np.unique(output.client).tolist():
            rows = np.flatnonzero(output.client == number)
            self.send(number, _tokens(output, rows, _of_rows(output.logprobs, rows), _of_rows(waits, rows)))

    def flush(self) -> None:
        """Try again what peers could not take before."""
        for client in [*self._by_number.values(), *self._expelled.values()]:
            while client.backlog and self._try_send(client, client.backlog[0]):
                client.backlog_bytes -= len(client.backlog.popleft())
        self._expelled = {identity: client for identity, client in self._expelled.items() if client.backlog}

    def close(self, linger_ms: int = 0) -> None:
        """What was sent may still leave within `linger_ms`, while the socket's context ends."""
        self._socket.close(linger=linger_ms)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.version not in (WIRE_VERSION, WIRE_VERSION - 1):
            reason = f"wire version {hello.version} is not understood, only {WIRE_VERSION}: update the older side"
            self._expel(identity, hello.client, "wire_version", reason)
            return
        # A client that says HELLO again has started anew: what it asked for before is nobody's now.
        self._forget(identity)
        client = _Client(identity, self._next_number, hello.client)
        self._next_number += 1
        self._by_identity[identity] = self._by_number[client.number] = client
        self._send(client, self._codec.encode(self._welcome))

    def _send(self, client: _Client, frame: bytes) -> None:
        if not client.backlog and self._try_send(client, frame):
            return
        if client.number not in self._by_number:
            return
        client.backlog.append(frame)
        client.backlog_bytes += len(frame)
        if client.backlog_bytes > MAX_BACKLOG_BYTES:
            self._expel(client.identity, client.name, "client_dropped", "it does not read what it asked for")

    def _try_send(self, client: _Client, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([client.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.info("client %s is gone", client.name)
            self._forget(client.identity)
            return False
        return True

    def _expel(self, identity: bytes, name: str, code: str, reason: str) -> None:
        """Serve a client no more, and tell it at the next flush: it must not wait for answers that never come."""
        logger.warning("client %s is dropped: %s", name[:80], reason)
        self._forget(identity)
        client = self._expelled[identity] = _Client(identity, -1, name)
        client.backlog.append(self._codec.encode(Failed(b"", code, reason)))

    def _forget(self, identity: bytes) -> None:
        self._expelled.pop(identity, None)
        client = self._by_identity.pop(identity, None)
        if client is not None:
            del self._by_number[client.number]
            client.backlog.clear()
            self._gone.append(client.number)


def _of_rows(by_row: dict[int, T], rows: NDArray[np.intp]) -> dict[int, T]:
    if not by_row:
        return by_row
    return {index: by_row[row] for index, row in enumerate(rows.tolist()) if row in by_row}


def _tokens(
    output: StepOutput, rows: Any, logprobs: dict[int, TokenLogprobs], waits: dict[int, FirstTokenWait]
) -> Tokens:
    return Tokens(
        ids=output.ids[rows].tobytes(),
        index=output.index[rows].tobytes(),
        token=output.tokens[rows].tobytes(),
        finish=output.finish[rows].tobytes(),
        cached=output.cached[rows].tobytes(),
        logprobs=logprobs,
        waits=waits,
    )
