"""Fake frontend, built on the text messages alone, for tests of tokenizer workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from minisgl.wire.messages import Flush, SamplingParams
from minisgl.wire.sockets import Codec, open_socket
from minisgl.wire.text import Accepted, Cancel, FromTokenizer, Generate, RequestsWait, TextFailed, Texts
from support.frontend.fake_scheduler import WAIT_SECONDS
from support.messages import generate_of

M = TypeVar("M", bound=msgspec.Struct)


class FakeFrontend:
    """Binds an address, sends messages, reads until the expected one arrives."""

    def __init__(self, address: str) -> None:
        self.accepted: list[bytes] = []
        """Requests that were accepted during `wait_for_ends`."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER)
        self._socket.bind(address)
        self._codec: Codec[FromTokenizer] = Codec(FromTokenizer)

    def send(self, message: Generate | Cancel | Flush | RequestsWait) -> None:
        self._socket.send(self._codec.encode(message))

    def generate(self, number: int, prompt: str | None = "Hello", **changes: Any) -> bytes:
        request_id = b"%016d" % number
        params = changes.pop("params", SamplingParams(max_tokens=3))
        self.send(generate_of(id=request_id, prompt=prompt, params=params, **changes))
        return request_id

    def wait_for(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True) -> M:
        """Return the next message of the kind that matches, and drop those before it."""
        while self._socket.poll(int(WAIT_SECONDS * 1000)):
            message = self._codec.decode(self._socket.recv())
            if isinstance(message, kind) and matches(message):
                return message
        raise AssertionError(f"waited for {kind.__name__}")

    def wait_for_end(self, request_id: bytes) -> tuple[str, Any]:
        """Return the text that still arrives, and the end of the request or its failure."""
        return self.wait_for_ends(request_id)[request_id]

    def wait_for_ends(self, *request_ids: bytes) -> dict[bytes, tuple[str, Any]]:
        """Do so for several requests."""
        texts = dict.fromkeys(request_ids, "")
        ends: dict[bytes, tuple[str, Any]] = {}
        while len(ends) < len(texts):
            message: Any = self.wait_for(msgspec.Struct)
            if isinstance(message, TextFailed) and message.id in texts:
                ends[message.id] = (texts[message.id], message)
            elif isinstance(message, Accepted):
                self.accepted.append(message.id)
            elif isinstance(message, Texts):
                for known, piece in message.rows():
                    if known in texts:
                        texts[known] += piece
                ends |= {end.id: (texts[end.id], end) for end in message.finished if end.id in texts}
        return ends

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
