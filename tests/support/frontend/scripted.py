"""A real HTTP server on a tokenizer worker that answers with the steps of a test: text, reasoning and tool calls."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import zmq

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.wire.sockets import Codec, open_socket
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    Accepted,
    CheckConstraints,
    CheckedConstraints,
    Encode,
    Encoded,
    Finished,
    FromTokenizer,
    Generate,
    SamplingDefaults,
    ScoredToken,
    ServedModel,
    TextFailed,
    Texts,
    ToolCallDelta,
    ToTokenizer,
    WorkerState,
)
from support.frontend.fake_scheduler import WAIT_SECONDS, card

M = TypeVar("M", bound=msgspec.Struct)

MODEL = ServedModel(
    card=card("org/tiny"),
    epoch=(1, 1),
    defaults=SamplingDefaults(temperature=0.6),
    capabilities=("chat", "tools", "reasoning", "reasoning_switch"),
)


class Step(msgspec.Struct, frozen=True):
    """Output of one step of a request."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    scored: tuple[ScoredToken, ...] = ()


Script = Callable[[Generate], Sequence[FromTokenizer]]


def thinks(reasoning: str) -> Step:
    return Step(reasoning=reasoning)


def says(text: str) -> Step:
    return Step(text)


def calls(index: int, name: str, *pieces: str, call_id: str | None = None) -> list[Step]:
    """Return a call whose arguments arrive in pieces."""
    first = Step(calls=(ToolCallDelta(index, call_id or f"call_{index}", name, ""),))
    return [first, *(Step(calls=(ToolCallDelta(index, "", "", piece),)) for piece in pieces)]


def answer(*steps: Step | Sequence[Step], ends: bool = True, **end: Any) -> Script:
    """Return the script of a request. `end` has fields of `Finished`; `ends`: whether the answer ends by itself."""
    flat = [step for item in steps for step in ([item] if isinstance(item, Step) else item)]

    def script(request: Generate) -> list[FromTokenizer]:
        messages: list[FromTokenizer] = [Accepted(request.id, 3)]
        for number, step in enumerate(flat, 1):
            messages.append(
                Texts(
                    ids=request.id,
                    texts=[step.text],
                    finished=[],
                    counts=[number],
                    reasoning={0: step.reasoning} if step.reasoning else {},
                    tool_calls={0: list(step.calls)} if step.calls else {},
                    scored={0: list(step.scored)} if step.scored else {},
                )
            )
        if not ends:
            return messages
        tokens = {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": len(flat) + 1}
        finished = Finished(id=request.id, **{"reason": "stop", **tokens, **end})
        return [*messages, Texts(ids=b"", texts=[], finished=[finished], counts=[])]

    return script


class ScriptedStack:
    """`script` maps each request to the messages that answer it."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.script: Script = answer()
        self.model = MODEL
        self._received: list[ToTokenizer] = []
        address = f"ipc://{path}/text"
        self.server = FrontendServer(FrontendConfig(port=0, tokenizer_addresses=(address,), **config))
        listening = threading.Event()
        self._server_thread = threading.Thread(target=self.server.run, args=(lambda _: listening.set(),))
        self._server_thread.start()
        assert listening.wait(WAIT_SECONDS)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS)
        self._outgoing: deque[FromTokenizer] = deque()
        self._wake_read, self._wake_write = os.pipe()
        self._stopping = False
        self._worker_thread = threading.Thread(target=self._serve, args=(address,))
        self._worker_thread.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, "the server does not become ready"
            time.sleep(0.02)

    def reset(self) -> None:
        self.script = answer()
        self.serve(MODEL)
        self._received.clear()

    def serve(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        if model == self.model:
            return
        self.model = model
        os.write(self._wake_write, b"!")
        deadline = time.monotonic() + WAIT_SECONDS
        expected = {
            "capabilities": [*(model.capabilities or ())] if model.card.task == "generate" else [model.card.task],
            "weight_version": model.card.revision,
        }
        while not expected.items() <= self.http.get("/get_model_info").json().items():
            assert time.monotonic() < deadline, "the server does not learn of the model"
            time.sleep(0.02)

    def fail_last(self) -> None:
        """End the last request with an error."""
        request_id = self.last(Generate).id
        self._outgoing.append(TextFailed(id=request_id, code="engine_unavailable", message="it broke"))
        os.write(self._wake_write, b"!")

    def last(self, kind: type[M]) -> M:
        """Return the last message of a kind that the worker received."""
        return next(message for message in reversed(self._received) if isinstance(message, kind))

    def close(self) -> None:
        self.http.close()
        self.server.stop()
        self.server.stop()
        self._server_thread.join(WAIT_SECONDS)
        self._stopping = True
        os.write(self._wake_write, b"!")
        self._worker_thread.join(WAIT_SECONDS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self, address: str) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = open_socket(context, zmq.DEALER)
        socket.connect(address)
        codec: Codec[ToTokenizer] = Codec(ToTokenizer)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(200))
            self._outgoing.append(
                WorkerState(version=TEXT_WIRE_VERSION, at=time.monotonic(), model=self.model, status=None)
            )
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if socket in ready:
                request = codec.decode(socket.recv())
                self._received.append(request)
                self._outgoing.extend(self._reply(request))
            while self._outgoing:
                socket.send(codec.encode(self._outgoing.popleft()))
        socket.close(linger=0)
        context.term()

    def _reply(self, request: ToTokenizer) -> Sequence[FromTokenizer]:
        match request:
            case Generate():
                return self.script(request)
            case Encode():
                words = sum(len((message.content or "").split()) for message in request.messages or ())
                return [Encoded(id=request.id, tokens=bytes(4 * words), names=[b""] * words)]
            case CheckConstraints():
                return [CheckedConstraints(id=request.id, problems=(None,) * len(request.constraints))]
        return ()
