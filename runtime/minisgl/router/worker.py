"""The tokenizer worker: one loop over its sockets, a thread for each size of prompts and questions to encode, and two
threads that check constraints.

Encoding a long prompt or building a grammar takes far longer than turning a step's tokens into text, so threads do it:
running answers never wait for a new request. Prompts that arrive while a thread is busy are its next batches, in turns
of their tenants (`encode_queue.py`). A short prompt that arrives alone is encoded by the loop itself, because two
changes of threads take as long.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import zmq

from minisgl.errors import PromptError
from minisgl.router.config import TokenizerConfig
from minisgl.router.constraint_checks import ConstraintChecks
from minisgl.router.discovery import Resolve, resolve_host
from minisgl.router.encode_queue import EncodeQueue
from minisgl.router.engine_source import engine_source
from minisgl.router.link import Link
from minisgl.router.router import Router
from minisgl.tokenizer.answer_constraints import AnswerConstraints, PreparedConstraints, needs_grammar
from minisgl.tokenizer.answer_scanner import reasoning_state
from minisgl.tokenizer.loaded import LoadedTokenizer
from minisgl.tokenizer.prompt_encoder import BadWords, Prompt, PromptEncoder
from minisgl.tokenizer.session import NO_PREDICTION, Session
from minisgl.wire.messages import Flush
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError
from minisgl.wire.text import (
    Cancel,
    CheckConstraints,
    Decode,
    Describe,
    Encode,
    Generate,
    Question,
    Reply,
    RequestsWait,
    TextFailed,
    ToTokenizer,
)

logger = logging.getLogger(__name__)

SMALL_BYTES: Final = 2 << 10
"""A message up to this size is encoded in a quarter of a millisecond."""
ENCODER_BYTES: Final = (16 << 10, 256 << 10, MAX_MESSAGE_BYTES)
"""Largest message of each encoder thread: encoding some megabytes takes seconds, for which no shorter one waits."""


class _Encoded(NamedTuple):
    """A request with everything that takes long to make."""

    request: Generate
    prompt: Prompt | PromptError
    bad_words: BadWords = ()
    constraints: PreparedConstraints | None = None
    prediction: Prompt = NO_PREDICTION


_Results: TypeAlias = "tuple[LoadedTokenizer, list[_Encoded], list[Reply | TextFailed]]"
"""The tokenizer of a batch, its encoded requests, and the replies to its questions."""


class _EncoderThread:
    """A queue of messages to encode, and a thread that takes them in batches."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._queue = EncodeQueue()
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, name)
        self._batch: Future[_Results] | None = None

    def add(self, size: int, message: Generate | Question) -> None:
        self._queue.add(size, message)

    def take_results(self) -> _Results | None:
        """Return the results of a finished batch; None if there is nothing new."""
        if self._batch is None or not self._batch.done():
            return None
        done, self._batch = self._batch, None
        return done.result()

    def submit_batch(self, tokenizer: LoadedTokenizer, session: Session) -> _Results | None:
        """Give an idle thread the next batch, without requests that were cancelled. A single small message without a
        grammar is encoded here instead: returns its results."""
        if self._batch is not None or not self._queue:
            return None
        only = self._queue.only()
        taken = self._queue.take_batch()
        requests = [one for one in taken if isinstance(one, Generate) and one.id in session]
        questions = [one for one in taken if not isinstance(one, Generate)]
        if only is not None and _is_small(*only):
            return _encode(tokenizer, session.max_model_len, requests, questions)
        self._batch = self._pool.submit(_encode, tokenizer, session.max_model_len, requests, questions)
        self._batch.add_done_callback(lambda _: self._wake())
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Worker:
    """Connects a frontend with the engines. `serve` runs until `stop`, which any thread or signal handler may call."""

    def __init__(self, config: TokenizerConfig, resolve: Resolve = resolve_host) -> None:
        """Opens the sockets; on one machine, loads the tokenizer first. `resolve` looks up a cluster's engines.
        Raises TokenizerError."""
        # First, because nothing has to be closed yet if it fails.
        source = engine_source(config, resolve)
        self._session = Session()
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.RLock()
        """Held while the event is set or closed: `stop` may be called after the worker has ended. Reentrant,
        because a signal may arrive in the thread that holds it."""
        self._closed = False
        self._stopping = False
        self._frontend = Link(self._context, config.frontend_address)
        self._from_frontend: Codec[ToTokenizer] = Codec(ToTokenizer)
        self._encoders = {size: _EncoderThread(f"encoder-{size >> 10}k", self._wake) for size in ENCODER_BYTES}
        self._constraint_checks = ConstraintChecks(self._wake)
        self._router = Router(
            self._context,
            config,
            source,
            self._session,
            send_to_frontend=self._frontend.send,
            wake=self._wake,
            reencode=self._reencode,
        )

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def serve(self) -> None:
        # What exists now stays: without it, a collection of garbage takes no noticeable time.
        gc.collect()
        gc.freeze()
        try:
            self._router.start()
            while not self._stopping:
                self._run_once()
        finally:
            self._close()

    def _run_once(self) -> None:
        """Wait for an event, then handle all that have happened."""
        poller = zmq.Poller()
        poller.register(self._wake_event, zmq.POLLIN)
        self._frontend.register(poller)
        self._router.register(poller)
        ready = dict(poller.poll(self._router.wait_ms))
        if self._wake_event in ready:
            os.eventfd_read(self._wake_event)
        # Tokens first: users watch their text appear.
        self._router.run_once(ready)
        for frame in self._frontend.receive(ready):
            self._on_frontend_frame(frame)
        if self._frontend.take_lost():
            aborted = len(self._session)
            # At a stop the frontend ends first, and nothing is lost.
            if aborted:
                logger.warning("the frontend was lost; %d requests end", aborted)
            self._session.abort_all()
            self._router.set_requests_wait(False)
        self._exchange_batches()
        for answer in self._constraint_checks.take_answers():
            self._frontend.send(answer)
        for request in self._session.take_to_scheduler():
            self._router.send(request)
        for message in self._session.take_to_frontend():
            self._frontend.send(message)
        self._router.flush()
        self._frontend.flush()

    def _on_frontend_frame(self, frame: bytes) -> None:
        try:
            message = self._from_frontend.decode(frame)
        except WireError as error:
            logger.error("invalid message of the frontend: %s", error)
            return
        match message:
            case Generate():
                if self._session.begin(message):
                    self._enqueue(len(frame), message)
            case Cancel():
                self._session.cancel(message)
            case Encode() | Decode() | Describe():
                self._enqueue(len(frame), message)
            case CheckConstraints():
                self._constraint_checks.begin(message)
            case Flush():
                self._router.flush_prefix_caches(message)
            case RequestsWait():
                self._router.set_requests_wait(message.waits)

    def _enqueue(self, size: int, message: Generate | Question) -> None:
        fitting = next((limit for limit in ENCODER_BYTES if size <= limit), ENCODER_BYTES[-1])
        self._encoders[fitting].add(size, message)

    def _reencode(self, request: Generate) -> None:
        self._enqueue(len(msgspec.msgpack.encode(request)), request)

    def _exchange_batches(self) -> None:
        """Take the results of the encoder threads, and give idle ones their next batch."""
        tokenizer = self._router.tokenizer
        for encoder in self._encoders.values():
            done = encoder.take_results()
            # First, so that the thread encodes while its results are submitted.
            encoded_here = None if tokenizer is None else encoder.submit_batch(tokenizer, self._session)
            for results in (done, encoded_here):
                if results is not None:
                    self._on_results(results)

    def _on_results(self, results: _Results) -> None:
        encoded_with, prompts, replies = results
        for request, prompt, bad_words, constraints, prediction in prompts:
            if encoded_with is self._router.tokenizer:
                self._session.encoded(request.id, prompt, bad_words, constraints, prediction)
            else:
                self._reencode(request)
        for reply in replies:
            self._frontend.send(reply)

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_event, 1)

    def _close(self) -> None:
        for encoder in self._encoders.values():
            encoder.close()
        self._constraint_checks.close()
        self._router.close()
        self._frontend.close()
        self._context.term()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_event)


def _is_small(size: int, message: Generate | Question) -> bool:
    return size <= SMALL_BYTES and not (isinstance(message, Generate) and needs_grammar(message))


def _encode(
    tokenizer: LoadedTokenizer, max_model_len: int | None, requests: list[Generate], questions: list[Question]
) -> _Results:
    """Runs in an encoder thread, or in the loop for a small message."""
    encoded: list[_Encoded] = []
    constraints = AnswerConstraints(tokenizer.answers)
    known: tuple[tuple[str, ...], BadWords | PromptError] = ((), ())
    known_prediction: tuple[str, Prompt] = ("", NO_PREDICTION)
    for request, prompt in zip(requests, tokenizer.encoder.encode(requests, max_model_len), strict=True):
        if isinstance(prompt, PromptError):
            encoded.append(_Encoded(request, prompt))
            continue
        words = request.options.bad_words
        if words != known[0]:
            # The choices of one request have the same ones.
            known = words, tokenizer.encoder.bad_words(words)
        if isinstance(known[1], PromptError):
            encoded.append(_Encoded(request, known[1]))
            continue
        text = request.options.prediction
        if text != known_prediction[0]:
            prediction = tokenizer.encoder.prediction(text)
            # No more than a hint: an answer does not depend on it.
            known_prediction = text, NO_PREDICTION if isinstance(prediction, PromptError) else prediction
        prepared = None
        if needs_grammar(request):
            state = reasoning_state(request, tokenizer.answers, tokenizer.token_bytes, prompt)
            prepared = constraints.prepare(request, state)
        encoded.append(_Encoded(request, prompt, known[1], prepared, known_prediction[1]))
    return tokenizer, encoded, [_reply(tokenizer.encoder, question) for question in questions]


def _reply(encoder: PromptEncoder, question: Question) -> Reply | TextFailed:
    match question:
        case Encode():
            reply: Reply | PromptError = encoder.encoded(question)
        case Decode():
            reply = encoder.decoded(question)
        case Describe():
            reply = encoder.tokenizer_info(question)
    if isinstance(reply, PromptError):
        return TextFailed(id=question.id, code=reply.code, message=reply.message, param=reply.param)
    if len(msgspec.msgpack.encode(reply)) > MAX_MESSAGE_BYTES:
        # The frontend would drop the connection, and with it every request.
        message = f"the answer exceeds {MAX_MESSAGE_BYTES >> 20} MiB; send a shorter request"
        return TextFailed(id=question.id, code="invalid_request", message=message)
    return reply


def run(config: TokenizerConfig, on_ready: Callable[[], None] | None = None) -> None:
    """Run the worker's process until SIGTERM. `on_ready` is called once its sockets are open, which may be before an
    engine has answered. Raises TokenizerError.

    SIGINT is ignored: a terminal sends it to every process, and the frontend needs this one until it has drained.
    """
    worker = Worker(config)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    if on_ready is not None:
        on_ready()
    worker.serve()
