"""Fake scheduler, built on the wire contract alone: a ROUTER in a thread that replies with the tokens of a test."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from minisgl.wire.messages import (
    FEATURES,
    FINISH_REASONS,
    WIRE_VERSION,
    Ack,
    Failed,
    FinishReason,
    FromScheduler,
    Hello,
    ModelCard,
    Pool,
    Pooled,
    Submit,
    Tokens,
    ToScheduler,
    Welcome,
)
from minisgl.wire.sockets import Codec, open_socket
from support.messages import status_of

M = TypeVar("M", bound=msgspec.Struct)

WAIT_SECONDS = 60.0

STATUS = status_of()


def card(name: str = "tiny", max_model_len: int = 256, vocab_size: int = 512, **changes: Any) -> ModelCard:
    return msgspec.structs.replace(
        ModelCard(
            name=name,
            revision="r1",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(),
            tokenizer_hashes={},
        ),
        **changes,
    )


def row(request_id: bytes, index: int, token: int, finish: FinishReason | None = None, cached: int = 0) -> Tokens:
    """Return the message of a step in which one request got one token."""
    return Tokens(
        ids=request_id,
        index=np.array([index], "<i4").tobytes(),
        token=np.array([token], "<i4").tobytes(),
        finish=np.array([FINISH_REASONS.index(finish)], np.uint8).tobytes(),
        cached=np.array([cached], "<i4").tobytes(),
    )


def answer_with(tokens: Sequence[int], cached: int = 0) -> Callable[[Submit], list[FromScheduler]]:
    """Return a reply to requests: an Ack, then these tokens, repeated up to max_tokens, behind those that the request
    has. A negative token −t stands for t with finish reason `stop`."""

    def answer(submit: Submit) -> list[FromScheduler]:
        messages: list[FromScheduler] = [Ack(submit.id)]
        limit = submit.params.max_tokens or 0
        for index in range(len(submit.output) // 4, limit):
            token = tokens[index % len(tokens)]
            last: FinishReason | None = "stop" if token < 0 else "length" if index == limit - 1 else None
            messages.append(row(submit.id, index, abs(token), last, cached))
            if last is not None:
                break
        return messages

    return answer


def pooled_row(request: Pool, values: Sequence[float], cached: int = 0) -> Pooled:
    """Return the message of a step in which one text got its output."""
    numbers = np.array(values, "<f4").tobytes()
    return Pooled(ids=request.id, cached=np.array([cached], "<i4").tobytes(), values=numbers)


class FakeScheduler:
    """`answer` maps each Submit, and `pool` each Pool, to messages that are sent immediately; more can be sent with
    `send`."""

    def __init__(
        self,
        address: str,
        model: ModelCard,
        answer: Callable[[Submit], Sequence[FromScheduler]] = lambda _: (),
        *,
        epoch: tuple[int, int] = (1_700_000_000_000, 1),
        replica: str = "",
        revision: str = "",
        features: tuple[str, ...] = FEATURES,
        newest_version: int = WIRE_VERSION,
    ) -> None:
        """`newest_version`: later wire versions are refused."""
        self.answer = answer
        self.pool: Callable[[Pool], Sequence[FromScheduler]] = lambda _: ()
        self.welcome = Welcome(
            version=WIRE_VERSION, epoch=epoch, model=model, replica=replica, revision=revision, features=features
        )
        self.status = STATUS
        """Status that is sent ten times a second."""
        self._newest_version = newest_version
        self.sends_status = True
        """Whether the status is sent."""
        self._received: list[ToScheduler] = []
        self._outgoing: deque[tuple[bytes, FromScheduler]] = deque()
        self._clients: list[bytes] = []
        self._owner: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER)
        self._socket.bind(address)
        self._wake_read, self._wake_write = os.pipe()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fake-scheduler")
        self._thread.start()

    def reset(self) -> None:
        """Forget received messages, and reply to none."""
        with self._changed:
            self._received.clear()
            self.answer = lambda _: ()
            self.pool = lambda _: ()

    def send(self, *messages: FromScheduler, to: Submit | None = None) -> None:
        """Send to the client of a request, or to the latest client."""
        with self._changed:
            identity = self._clients[-1] if to is None else self._owner[to.id]
            self._outgoing.extend((identity, message) for message in messages)
        os.write(self._wake_write, b"!")

    def received(self, kind: type[M]) -> list[M]:
        with self._changed:
            return [message for message in self._received if isinstance(message, kind)]

    def wait_for(self, kind: type[M], count: int = 1) -> list[M]:
        """Return the messages of a kind, once there are `count`."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: sum(isinstance(message, kind) for message in self._received) >= count, WAIT_SECONDS
            )
            assert enough, f"waited for {count} {kind.__name__}, got {self._received}"
            return [message for message in self._received if isinstance(message, kind)]

    def close(self, linger_ms: int = 0) -> None:
        """Close; sent messages may still leave within `linger_ms`. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        os.write(self._wake_write, b"!")
        self._thread.join()
        self._socket.close(linger=linger_ms)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        codec: Codec[ToScheduler] = Codec(ToScheduler)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_status = 0.0
        while not self._stopping:
            ready = dict(poller.poll(50))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._socket in ready:
                identity, frame = self._socket.recv_multipart()
                message = codec.decode(frame)
                with self._changed:
                    self._received.append(message)
                    self._changed.notify_all()
                    self._outgoing.extend((identity, reply) for reply in self._replies(identity, message))
            while self._outgoing:
                identity, reply = self._outgoing.popleft()
                self._deliver(identity, codec.encode(reply))
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + 0.1
                for identity in self._clients if self.sends_status else ():
                    self._deliver(identity, codec.encode(self.status))

    def _replies(self, identity: bytes, message: ToScheduler) -> Sequence[FromScheduler]:
        if isinstance(message, Hello):
            self._clients.append(identity)
            if message.version > self._newest_version:
                return [Failed(b"", "wire_version", f"wire version {message.version} is not supported")]
            is_older = message.version < WIRE_VERSION
            return [msgspec.structs.replace(self.welcome, version=message.version) if is_older else self.welcome]
        if isinstance(message, Submit):
            self._owner[message.id] = identity
            return self.answer(message)
        if isinstance(message, Pool):
            self._owner[message.id] = identity
            return self.pool(message)
        return ()

    def _deliver(self, identity: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            assert error.errno == zmq.EHOSTUNREACH, error
