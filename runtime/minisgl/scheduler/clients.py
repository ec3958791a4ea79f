"""Clients of a scheduler: one ROUTER socket, and a queue per client that never blocks the step loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import (
    FEATURES,
    WIRE_VERSION,
    Ack,
    Failed,
    FirstTokenWait,
    FromScheduler,
    Hello,
    ModelCard,
    Pooled,
    TokenLogprobs,
    Tokens,
    ToScheduler,
    Welcome,
)
from minisgl.wire.peer_secret import NO_SECRET, PeerSecret
from minisgl.wire.receive_limit import ReceiveLimit
from minisgl.wire.sockets import Codec, WireError, open_socket

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BACKLOG_BYTES: Final = 64 << 20
"""Limit of the messages queued for a client that does not read; a client that exceeds it is dropped."""
MAX_GREETING_BYTES: Final = 4096
"""Size of the messages that are decoded of a connection without a valid greeting."""
MAX_MESSAGES_PER_POLL: Final = 64
"""Messages received between two steps, so that a burst of requests cannot stall running ones."""
SHARED_MESSAGES_PER_POLL: Final = 16
"""The same while several tenants are here: 64 take as long as a step, and the first token of another one waits."""


class _Client:
    """A connection and the messages that its socket did not accept yet."""

    def __init__(self, identity: bytes, number: int, name: str) -> None:
        self.identity = identity
        self.number = number
        self.name = name
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0


class Clients:
    """Clients numbered in the order of their HELLO; a number is never reused."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        model: ModelCard,
        epoch: tuple[int, int],
        *,
        replica: str = "",
        revision: str = "",
        secret: PeerSecret = NO_SECRET,
    ) -> None:
        """Bind `address`. `secret`: while it is required, connections are closed whose HELLO it refuses, or that send
        none. The other arguments are for the answer to a HELLO, see `Welcome`."""
        self._secret = secret
        self._socket = open_socket(context, zmq.ROUTER)
        self._limit = ReceiveLimit(self._socket, secret.is_required) if address.startswith("tcp:") else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            # An open socket would block the termination of its context, and with it the process, forever.
            self.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._codec: Codec[ToScheduler] = Codec(ToScheduler)
        self._welcome = Welcome(
            version=WIRE_VERSION, epoch=epoch, model=model, replica=replica, revision=revision, features=FEATURES
        )
        self._by_identity: dict[bytes, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._dropped: dict[bytes, _Client] = {}
        """Dropped clients by identity; the backlog of each is the message that reports it, until it can be sent."""
        self._next_number = 0
        self._disconnected: list[int] = []

    def receive(self, wait_ms: int, most: int = MAX_MESSAGES_PER_POLL) -> Iterator[tuple[int, ToScheduler]]:
        """At most so many messages of clients that have said HELLO, with the client's number; waits up to `wait_ms` for
        the first."""
        if wait_ms:
            self._socket.poll(wait_ms)
        for _ in range(most):
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                if self._limit is not None:
                    self._limit.all_received()
                return
            received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._limit is not None:
                self._limit.delivered(received)
            identity, frames = received[0].bytes, received[1:]
            client = self._by_identity.get(identity)
            if client is None and not self._may_greet(received):
                continue
            try:
                message = self._codec.decode(frames[0].buffer if len(frames) == 1 else b"")
            except WireError as error:
                if client is None and self._secret.is_required():
                    self._refuse(received, identity.hex())
                else:
                    self._drop_client(identity, identity.hex(), "invalid_message", str(error))
                continue
            if isinstance(message, Hello):
                if self._secret.refuses(message.proof, "scheduler", identity.hex()):
                    self._refuse(received, message.client)
                else:
                    self._handle_hello(identity, message)
                    if self._limit is not None:
                        self._limit.greeted(received)
            elif client is not None:
                yield client.number, message

    def take_disconnected(self) -> list[int]:
        """Numbers of clients that disconnected since the last call."""
        disconnected, self._disconnected = self._disconnected, []
        return disconnected

    def send(self, number: int, message: FromScheduler) -> None:
        """Queue a message to one client; a number that is not in use is ignored."""
        client = self._by_number.get(number)
        if client is not None:
            self._send(client, self._codec.encode(message))

    def broadcast(self, message: FromScheduler) -> None:
        """Queue a message to every client."""
        frame = self._codec.encode(message)
        for client in list(self._by_number.values()):
            self._send(client, frame)

    def send_step(self, output: StepOutput, now: float) -> None:
        """Queue one message to each client that has rows in the step. `now`: seconds, by the scheduler's clock."""
        for number, request_id in output.accepted:
            self.send(number, Ack(request_id))
        for failure in output.failures:
            self.send(failure.client, Failed(failure.id, failure.code, failure.message))
        for number, prompt in output.prompt_logprobs:
            self.send(number, prompt)
        if not len(output.client):
            return
        first = int(output.client[0])
        waits = {row: FirstTokenWait(queued, now - admitted) for row, (queued, admitted) in output.started.items()}
        if output.pooled is not None:
            for number in np.unique(output.client).tolist():
                self.send(number, _pooled(output, np.flatnonzero(output.client == number), waits))
            return
        if np.count_nonzero(output.client == first) == len(output.client):
            everything = (output.logprobs, waits, output.preemptions, output.predicted)
            self.send(first, _tokens(output, slice(None), *everything))
            return
        for number in np.unique(output.client).tolist():
            rows = np.flatnonzero(output.client == number)
            logprobs, started = _select_rows(output.logprobs, rows), _select_rows(waits, rows)
            preemptions, predicted = _select_rows(output.preemptions, rows), _select_rows(output.predicted, rows)
            self.send(number, _tokens(output, rows, logprobs, started, preemptions, predicted))

    def flush(self) -> None:
        """Retry messages that the sockets of clients did not accept before."""
        for client in [*self._by_number.values(), *self._dropped.values()]:
            while client.backlog and self._try_send(client, client.backlog[0]):
                client.backlog_bytes -= len(client.backlog.popleft())
        self._dropped = {identity: client for identity, client in self._dropped.items() if client.backlog}

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; sent messages may still leave within `linger_ms`, while the socket's context terminates."""
        if self._limit is not None:
            self._limit.close()
            self._limit = None
        self._socket.close(linger=linger_ms)

    def _may_greet(self, received: list[zmq.Frame]) -> bool:
        """Whether a message of an unknown client is worth its decoding."""
        if sum(map(len, received)) > MAX_GREETING_BYTES:
            return False
        return self._limit is None or not self._limit.is_refused(received)

    def _refuse(self, received: list[zmq.Frame], name: str) -> None:
        logger.warning("client %s refused: it does not know the secret of the model's pods", name[:80])
        if self._limit is not None:
            self._limit.refuse(received)

    def _handle_hello(self, identity: bytes, hello: Hello) -> None:
        if hello.version not in (WIRE_VERSION, WIRE_VERSION - 1):
            known = f"{WIRE_VERSION} and {WIRE_VERSION - 1}"
            reason = f"wire version {hello.version} is not supported, only {known}; update the older side"
            self._drop_client(identity, hello.client, "wire_version", reason)
            return
        # A client that sends HELLO again has restarted: the requests of the old process are aborted.
        self._forget(identity)
        client = _Client(identity, self._next_number, hello.client)
        self._next_number += 1
        self._by_identity[identity] = self._by_number[client.number] = client
        # A client of the version before is answered in that version.
        self._send(client, self._codec.encode(msgspec.structs.replace(self._welcome, version=hello.version)))

    def _send(self, client: _Client, frame: bytes) -> None:
        if not client.backlog and self._try_send(client, frame):
            return
        if client.number not in self._by_number:
            return
        client.backlog.append(frame)
        client.backlog_bytes += len(frame)
        if client.backlog_bytes > MAX_BACKLOG_BYTES:
            reason = f"the client does not read its messages: more than {MAX_BACKLOG_BYTES >> 20} MiB are queued"
            self._drop_client(client.identity, client.name, "client_dropped", reason)

    def _try_send(self, client: _Client, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([client.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.info("client %s disconnected", client.name)
            self._forget(client.identity)
            return False
        return True

    def _drop_client(self, identity: bytes, name: str, code: str, reason: str) -> None:
        """Stop serving a client; the next flush sends it the reason, so that it does not wait for answers forever."""
        logger.warning("client %s dropped: %s", name[:80], reason)
        self._forget(identity)
        client = self._dropped[identity] = _Client(identity, -1, name)
        client.backlog.append(self._codec.encode(Failed(b"", code, reason)))

    def _forget(self, identity: bytes) -> None:
        self._dropped.pop(identity, None)
        client = self._by_identity.pop(identity, None)
        if client is not None:
            del self._by_number[client.number]
            client.backlog.clear()
            self._disconnected.append(client.number)


def _select_rows(by_row: dict[int, T], rows: NDArray[np.intp]) -> dict[int, T]:
    """The entries of `rows`, by their index in `rows`."""
    if not by_row:
        return by_row
    return {index: by_row[row] for index, row in enumerate(rows.tolist()) if row in by_row}


def _pooled(output: StepOutput, rows: NDArray[np.intp], waits: dict[int, FirstTokenWait]) -> Pooled:
    assert output.pooled is not None
    return Pooled(
        ids=output.ids[rows].tobytes(),
        cached=output.cached[rows].tobytes(),
        values=output.pooled[rows].astype("<f4", copy=False).tobytes(),
        waits=_select_rows(waits, rows),
    )


def _tokens(
    output: StepOutput,
    rows: Any,
    logprobs: dict[int, TokenLogprobs],
    waits: dict[int, FirstTokenWait],
    preemptions: dict[int, int],
    predicted: dict[int, tuple[int, int]],
) -> Tokens:
    return Tokens(
        ids=output.ids[rows].tobytes(),
        index=output.index[rows].tobytes(),
        token=output.tokens[rows].tobytes(),
        finish=output.finish[rows].tobytes(),
        cached=output.cached[rows].tobytes(),
        logprobs=logprobs,
        waits=waits,
        preemptions=preemptions,
        predicted=predicted,
    )
