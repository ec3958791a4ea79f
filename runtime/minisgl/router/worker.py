"""The tokenizer worker: one loop over its sockets, and one thread that encodes prompts and answers questions.

Encoding a long prompt takes far longer than turning a step's tokens into text, so it is done aside: running answers
never wait for a newcomer's prompt. What arrives while the thread is busy is encoded as one batch after that.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import msgspec
import zmq

from minisgl.router.config import TokenizerConfig
from minisgl.router.discovery import Resolve, resolve_host
from minisgl.router.link import Link
from minisgl.router.one_engine import OneEngine
from minisgl.router.router import Router
from minisgl.tokenizer.errors import PromptError
from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.tokenizer.prompt_encoder import Prompt, PromptEncoder, same_prompt
from minisgl.tokenizer.session import Session
from minisgl.wire.messages import Flush
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError
from minisgl.wire.text import Cancel, Decode, Describe, Encode, Generate, Question, Reply, TextFailed, ToTokenizer

logger = logging.getLogger(__name__)

ENCODE_BATCH: Final = 256
"""Requests and questions that a thread is given at a time, at most; and how many bytes of them."""
ENCODE_BATCH_BYTES: Final = 1 << 20
LARGE_BYTES: Final = 256 << 10
"""Larger messages have a thread of their own: to encode some megabytes takes seconds, for which no other waits."""

_Results: TypeAlias = "tuple[list[tuple[Generate, Prompt | PromptError]], list[Reply | TextFailed]]"


class _Lane:
    """What waits to be encoded, and a thread that does it."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._waiting: deque[tuple[int, Generate | Question]] = deque()
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, name)
        self._encoding: Future[_Results] | None = None
        self._encoding_with: LoadedTokenizer | None = None

    def add(self, size: int, message: Generate | Question) -> None:
        self._waiting.append((size, message))

    def take(self) -> tuple[LoadedTokenizer, _Results] | None:
        """What the thread has done, and with which tokenizer; None: nothing new."""
        if self._encoding is None or not self._encoding.done():
            return None
        assert self._encoding_with is not None
        done, self._encoding = self._encoding, None
        return self._encoding_with, done.result()

    def give(self, tokenizer: LoadedTokenizer, session: Session) -> None:
        """Have the thread go on with what has come, less what was cancelled, if it has nothing to do."""
        if self._encoding is not None or not self._waiting:
            return
        taken: list[Generate | Question] = []
        left = ENCODE_BATCH_BYTES
        while self._waiting and len(taken) < ENCODE_BATCH:
            size, message = self._waiting[0]
            # The choices of one request stay together: their prompt is encoded once.
            if left <= 0 and not _have_same_prompt(taken[-1], message):
                break
            self._waiting.popleft()
            taken.append(message)
            left -= size
        requests = [one for one in taken if isinstance(one, Generate) and one.id in session]
        questions = [one for one in taken if not isinstance(one, Generate)]
        self._encoding_with = tokenizer
        self._encoding = self._pool.submit(_work, tokenizer.encoder, requests, questions)
        self._encoding.add_done_callback(lambda _: self._wake())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Worker:
    """`serve` runs until `stop`, which any thread or signal handler may call."""

    def __init__(self, config: TokenizerConfig, resolve: Resolve = resolve_host) -> None:
        """Connects; where the files are at hand, loads the tokenizer first. `resolve` asks for the engines' addresses.
        Raises TokenizerError."""
        # First, because nothing has to be closed yet if it fails.
        tokenizer = load(config.model) if config.engines is None else None
        self._session = Session()
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_lock = threading.RLock()
        """Held while the pipe is written to or closed, for who stops the worker may be slower than its end. Reentrant,
        because a signal may come to the thread that holds it."""
        self._closed = False
        self._stopping = False
        self._frontend = Link(self._context, config.frontend_address)
        self._from_frontend: Codec[ToTokenizer] = Codec(ToTokenizer)
        self._lane, self._large_lane = _Lane("encoder", self._wake), _Lane("large-encoder", self._wake)
        self._engines: OneEngine | Router
        if tokenizer is not None:
            self._engines = OneEngine(self._context, config, tokenizer, self._session, self._frontend.send)
        else:
            self._engines = Router(
                self._context,
                config,
                self._session,
                tell=self._frontend.send,
                wake=self._wake,
                encode_again=self._encode_again,
                resolve=resolve,
            )

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def serve(self) -> None:
        try:
            self._engines.start()
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for something to happen, then deal with everything that has."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        self._frontend.register(poller)
        self._engines.register(poller)
        ready = dict(poller.poll(self._engines.wait_ms))
        if self._wake_read in ready:
            _drain(self._wake_read)
        # Texts first: they are what somebody looks at.
        self._engines.turn(ready)
        for frame in self._frontend.receive(ready):
            self._on_frontend_frame(frame)
        self._engines.after_turn()
        if self._frontend.take_lost():
            aborted = len(self._session)
            logger.log(logging.WARNING if aborted else logging.INFO, "the frontend is gone; %d requests end", aborted)
            self._session.abandoned()
        self._encode()
        for request in self._session.take_to_scheduler():
            self._engines.send(request)
        for message in self._session.take_to_frontend():
            self._frontend.send(message)
        self._engines.flush()
        self._frontend.flush()

    def _on_frontend_frame(self, frame: bytes) -> None:
        try:
            message = self._from_frontend.decode(frame)
        except WireError as error:
            logger.error("a message of the frontend is not understood: %s", error)
            return
        match message:
            case Generate():
                if self._session.begin(message):
                    self._wait(len(frame), message)
            case Cancel():
                self._session.cancel(message)
            case Encode() | Decode() | Describe():
                self._wait(len(frame), message)
            case Flush():
                self._engines.ask_to_flush(message)

    def _wait(self, size: int, message: Generate | Question) -> None:
        (self._large_lane if size > LARGE_BYTES else self._lane).add(size, message)

    def _encode_again(self, request: Generate) -> None:
        self._wait(len(msgspec.msgpack.encode(request)), request)

    def _encode(self) -> None:
        """Take in what the threads have done, and give them what has come meanwhile."""
        tokenizer = self._engines.tokenizer
        for lane in (self._lane, self._large_lane):
            if (done := lane.take()) is not None:
                encoded_with, (prompts, replies) = done
                for request, prompt in prompts:
                    if encoded_with is tokenizer:
                        self._session.encoded(request.id, prompt)
                    else:
                        self._encode_again(request)
                for reply in replies:
                    self._frontend.send(reply)
            if tokenizer is not None:
                lane.give(tokenizer, self._session)

    def _wake(self) -> None:
        with self._wake_lock:
            if self._closed:
                return
            try:
                os.write(self._wake_write, b"!")
            except BlockingIOError:
                # The pipe is full of wake-ups already.
                return

    def _close(self) -> None:
        self._lane.close()
        self._large_lane.close()
        self._engines.close()
        self._frontend.close()
        self._context.term()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)


def _have_same_prompt(one: Generate | Question, other: Generate | Question) -> bool:
    return isinstance(one, Generate) and isinstance(other, Generate) and same_prompt(one, other)


def _work(encoder: PromptEncoder, requests: list[Generate], questions: list[Question]) -> _Results:
    """In the thread: prompts for requests, replies to questions."""
    prompts = zip(requests, encoder.encode(requests), strict=True)
    return list(prompts), [_reply(encoder, question) for question in questions]


def _reply(encoder: PromptEncoder, question: Question) -> Reply | TextFailed:
    match question:
        case Encode():
            reply: Reply | PromptError = encoder.encoded(question)
        case Decode():
            reply = encoder.decoded(question)
        case Describe():
            reply = encoder.described(question)
    if isinstance(reply, PromptError):
        return TextFailed(id=question.id, code=reply.code, message=reply.message, param=reply.param)
    if len(msgspec.msgpack.encode(reply)) > MAX_MESSAGE_BYTES:
        # Sent all the same, it would cost the connection, and every request on it.
        message = f"the answer has more than {MAX_MESSAGE_BYTES >> 20} MiB: ask for less at a time"
        return TextFailed(id=question.id, code="invalid_request", message=message)
    return reply


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return


def run(config: TokenizerConfig, on_ready: Callable[[], None] | None = None) -> None:
    """The worker's process: serves until SIGTERM. `on_ready` is called once the worker connects; whether a scheduler
    has answered is told to the frontend. Raises TokenizerError.

    SIGINT is ignored: a terminal sends it to every process, and the frontend still needs this one to finish.
    """
    worker = Worker(config)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    if on_ready is not None:
        on_ready()
    worker.serve()
