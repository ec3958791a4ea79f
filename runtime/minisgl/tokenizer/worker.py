"""The tokenizer worker: one loop over two sockets, and one thread that encodes prompts and answers questions.

Encoding a long prompt takes far longer than turning a step's tokens into text, so it is done aside: running answers
never wait for a newcomer's prompt. What arrives while the thread is busy is encoded as one batch after that.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl.tokenizer.config import TokenizerConfig
from minisgl.tokenizer.errors import PromptError
from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import Prompt, PromptEncoder
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import (
    WIRE_VERSION,
    Ack,
    Failed,
    Flush,
    Flushed,
    FromScheduler,
    Hello,
    PromptLogprobs,
    Status,
    Tokens,
    Welcome,
)
from minisgl.wire.sockets import Codec, WireError, open_socket, try_send
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    Cancel,
    Decode,
    Describe,
    Encode,
    Generate,
    Question,
    Reply,
    ServedModel,
    TextFailed,
    ToTokenizer,
    WorkerState,
)

logger = logging.getLogger(__name__)

MAX_FRAMES_PER_TURN: Final = 256
"""Taken from one socket before the other has its turn."""
MAX_BACKLOG: Final = 1 << 16
"""Messages that may wait for a peer that does not read, before it counts as gone."""
ENCODE_BATCH: Final = 256

_Results: TypeAlias = "tuple[list[tuple[Generate, Prompt | PromptError]], list[Reply | TextFailed]]"


class Worker:
    """`serve` runs until `stop`, which any thread or signal handler may call."""

    def __init__(self, config: TokenizerConfig) -> None:
        """Loads the tokenizer and connects. Raises TokenizerError."""
        files = load_model_files(config.model)
        self._files = files
        self._encoder = PromptEncoder(files)
        self._session = Session(TokenBytes(files.tokenizer))
        self._context: zmq.Context[Any] = zmq.Context()
        self._frontend = _Link(self._context, config.frontend_address)
        self._scheduler = _Link(self._context, config.scheduler_address)
        self._from_frontend: Codec[ToTokenizer] = Codec(ToTokenizer)
        self._from_scheduler: Codec[FromScheduler] = Codec(FromScheduler)
        self._hello = Hello(WIRE_VERSION, config.name)
        self._model: ServedModel | None = None
        self._status: Status | None = None
        self._reason = "the scheduler has not answered yet"
        self._waiting: deque[Generate | Question] = deque()
        self._encoding: Future[_Results] | None = None
        self._pool = ThreadPoolExecutor(1, "encoder")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def serve(self) -> None:
        try:
            self._scheduler.send(self._hello)
            self._tell_state()
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for something to happen, then deal with everything that has."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        for link in (self._frontend, self._scheduler):
            link.register(poller)
        ready = dict(poller.poll())
        if self._wake_read in ready:
            _drain(self._wake_read)
        # Texts first: they are what somebody looks at.
        for frame in self._scheduler.receive():
            self._on_scheduler_frame(frame)
        for frame in self._frontend.receive():
            self._on_frontend_frame(frame)
        if self._scheduler.take_lost():
            self._lose_scheduler("engine_unavailable", "the connection to the engine was lost")
        if self._frontend.take_lost():
            aborted = len(self._session)
            logger.log(logging.WARNING if aborted else logging.INFO, "the frontend is gone; %d requests end", aborted)
            self._session.abandoned()
        self._encode()
        for request in self._session.take_to_scheduler():
            self._scheduler.send(request)
        for message in self._session.take_to_frontend():
            self._frontend.send(message)
        self._scheduler.flush()
        self._frontend.flush()

    def _on_scheduler_frame(self, frame: bytes) -> None:
        try:
            message = self._from_scheduler.decode(frame)
            match message:
                case Tokens():
                    self._session.tokens(message)
                case PromptLogprobs():
                    self._session.prompt_scored(message)
                case Ack():
                    self._session.acked(message)
                case Failed():
                    self._on_failed(message)
                case Status():
                    self._status = message
                    self._tell_state()
                case Welcome():
                    self._on_welcome(message)
                case Flushed():
                    self._frontend.send(message)
        except (WireError, msgspec.ValidationError) as error:
            # Tokens may have been in it, so no answer can be trusted any more.
            self._lose_scheduler("engine_error", f"the engine sent a message that cannot be understood: {error}")

    def _on_failed(self, failed: Failed) -> None:
        if failed.id:
            self._session.failed(failed)
        else:
            # It speaks of this connection as a whole. A new one helps, but not against another version.
            self._lose_scheduler(failed.code, failed.message, reconnect=failed.code != "wire_version")

    def _on_welcome(self, welcome: Welcome) -> None:
        theirs = welcome.model.tokenizer_hashes
        ours = self._files.hashes
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if welcome.version not in (WIRE_VERSION, WIRE_VERSION - 1):
            problem = f"it speaks wire version {welcome.version}, not {WIRE_VERSION}: update the older side"
        elif theirs and differing:
            problem = f"its tokenizer files differ from ours ({', '.join(differing)}): use the same checkpoint"
        else:
            self._model = ServedModel(card=welcome.model, epoch=welcome.epoch, defaults=self._files.defaults)
            self._reason = ""
            self._session.welcome(welcome.model)
            self._tell_state()
            return
        logger.error("the scheduler cannot be used: %s", problem)
        self._lose_scheduler("engine_unavailable", problem, reconnect=False)

    def _on_frontend_frame(self, frame: bytes) -> None:
        try:
            message = self._from_frontend.decode(frame)
        except WireError as error:
            logger.error("a message of the frontend is not understood: %s", error)
            return
        match message:
            case Generate():
                if self._session.begin(message):
                    self._waiting.append(message)
            case Cancel():
                self._session.cancel(message)
            case Encode() | Decode() | Describe():
                self._waiting.append(message)
            case Flush():
                self._scheduler.send(message)

    def _encode(self) -> None:
        """Take in what the thread has done, and give it what has come meanwhile."""
        if self._encoding is not None and self._encoding.done():
            prompts, replies = self._encoding.result()
            for request, prompt in prompts:
                self._session.encoded(request.id, prompt)
            for reply in replies:
                self._frontend.send(reply)
            self._encoding = None
        if self._encoding is None and self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(ENCODE_BATCH, len(self._waiting)))]
            requests = [one for one in taken if isinstance(one, Generate) and one.id in self._session]
            questions = [one for one in taken if not isinstance(one, Generate)]
            self._encoding = self._pool.submit(self._work, requests, questions)
            self._encoding.add_done_callback(lambda _: self._wake())

    def _work(self, requests: list[Generate], questions: list[Question]) -> _Results:
        """In the thread: prompts for requests, replies to questions."""
        prompts = zip(requests, self._encoder.encode(requests), strict=True)
        return list(prompts), [self._reply(question) for question in questions]

    def _reply(self, question: Question) -> Reply | TextFailed:
        match question:
            case Encode():
                reply: Reply | PromptError = self._encoder.encoded(question)
            case Decode():
                reply = self._encoder.decoded(question)
            case Describe():
                reply = self._encoder.described(question)
        if isinstance(reply, PromptError):
            return TextFailed(id=question.id, code=reply.code, message=reply.message, param=reply.param)
        return reply

    def _lose_scheduler(self, code: str, message: str, *, reconnect: bool = True) -> None:
        logger.warning("%s; %d requests fail", message, len(self._session))
        self._session.lost(code, message)
        self._model = self._status = None
        self._reason = message
        # A new socket with a new identity: nothing that was meant for the old scheduler can reach the next.
        self._scheduler.reconnect() if reconnect else self._scheduler.close()
        if reconnect:
            self._scheduler.send(self._hello)
        self._tell_state()

    def _tell_state(self) -> None:
        self._frontend.send(
            WorkerState(version=TEXT_WIRE_VERSION, model=self._model, status=self._status, reason=self._reason)
        )

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            # The pipe is full of wake-ups already.
            return

    def _close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._frontend.close()
        self._scheduler.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


class _Link:
    """A DEALER that is connected to one peer, what waits to be sent there, and whether the peer was lost."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._context = context
        self._address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._backlog: deque[bytes] = deque()
        self._lost = False
        self._socket: Any = None
        self.reconnect()

    def reconnect(self) -> None:
        """Forget the peer and what waits for it, and connect under a new identity."""
        self.close()
        self._socket = open_socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"t" + secrets.token_bytes(16))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)

    def register(self, poller: zmq.Poller) -> None:
        if self._socket is not None:
            poller.register(self._monitor, zmq.POLLIN)
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def send(self, message: msgspec.Struct) -> None:
        if self._socket is None:
            return
        self._backlog.append(self._encoder.encode(message))
        self.flush()

    def flush(self) -> None:
        while self._backlog and try_send(self._socket, [self._backlog[0]]):
            self._backlog.popleft()
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.clear()
            self._lost = True

    def receive(self) -> list[bytes]:
        frames: list[bytes] = []
        while self._socket is not None and len(frames) < MAX_FRAMES_PER_TURN:
            try:
                frames.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return frames

    def take_lost(self) -> bool:
        """Whether the peer was lost since the last call."""
        while self._socket is not None and self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            self._lost |= recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        lost, self._lost = self._lost, False
        return lost

    def close(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._socket = None
        self._backlog.clear()


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return


def run(config: TokenizerConfig, on_ready: Callable[[], None] | None = None) -> None:
    """The worker's process: serves until SIGTERM. `on_ready` is called once the tokenizer is loaded and the worker
    connects; whether a scheduler has answered is told to the frontend. Raises TokenizerError.

    SIGINT is ignored: a terminal sends it to every process, and the frontend still needs this one to finish.
    """
    worker = Worker(config)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    if on_ready is not None:
        on_ready()
    worker.serve()
