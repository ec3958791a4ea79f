"""A client of a scheduler."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable

import numpy as np
import zmq

from minisgl.wire.messages import (
    FINISH_REASONS,
    WIRE_VERSION,
    Abort,
    Ack,
    EndDrain,
    Failed,
    FromScheduler,
    Hello,
    SamplingParams,
    Status,
    Submit,
    Tokens,
    Welcome,
)
from minisgl.wire.sockets import Codec, open_socket


class SchedulerClient:
    """Send HELLO and wait for the welcome."""

    def __init__(self, address: str, seconds: float = 120.0) -> None:
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER)
        self._socket.connect(address)
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        # Identifiers of several clients must differ.
        self._numbers = itertools.count(secrets.randbits(64))
        self.accepted: set[bytes] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.finish: dict[bytes, str] = {}
        self.failed: dict[bytes, Failed] = {}
        self.status: Status | None = None
        self._welcome: Welcome | None = None
        self._socket.send(self._codec.encode(Hello(WIRE_VERSION, "test")))
        self.read_until(lambda: self._welcome is not None, seconds)

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome

    def send(self, message: Abort | EndDrain) -> None:
        self._socket.send(self._codec.encode(message))

    def submit(self, prompt: list[int], max_tokens: int) -> bytes:
        request_id = next(self._numbers).to_bytes(16, "big")
        self.tokens[request_id] = []
        packed = np.array(prompt, "<i4").tobytes()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        submit = Submit(id=request_id, prompt=packed, params=params)
        self._socket.send(self._codec.encode(submit))
        return request_id

    def generate(self, prompt: list[int], max_tokens: int, seconds: float = 120.0) -> list[int]:
        request_id = self.submit(prompt, max_tokens)
        self.read_until(lambda: request_id in self.finish, seconds)
        return self.tokens[request_id]

    def read_until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"did not happen within {seconds} s"
            if self._socket.poll(int(left * 1000) + 1):
                self._take(self._codec.decode(self._socket.recv()))

    def read_rest(self) -> None:
        """Read what a scheduler that has ended had sent."""
        while self._socket.poll(100):
            self._take(self._codec.decode(self._socket.recv()))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _take(self, message: FromScheduler) -> None:
        match message:
            case Welcome():
                self._welcome = message
            case Ack():
                self.accepted.add(message.id)
            case Status():
                self.status = message
            case Failed():
                self.failed[message.id] = message
            case Tokens():
                rows = message.rows()
                for row, request_id in enumerate(rows.ids):
                    assert rows.index[row] == len(self.tokens[request_id])
                    self.tokens[request_id].append(int(rows.token[row]))
                    if rows.finish[row]:
                        self.finish[request_id] = str(FINISH_REASONS[rows.finish[row]])
