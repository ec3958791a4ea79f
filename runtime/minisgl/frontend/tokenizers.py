"""The frontend's side of its tokenizer workers: which of them can serve, and who waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.frontend.server.traffic import Progress, Traffic
from minisgl.wire.messages import REQUEST_ID_BYTES, Flush, Flushed
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError, open_socket
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    Accepted,
    Cancel,
    Decoded,
    Described,
    Encoded,
    FromTokenizer,
    Generate,
    Question,
    Reply,
    ServedModel,
    TextFailed,
    Texts,
    ToTokenizer,
    WorkerState,
)

logger = logging.getLogger(__name__)

UNAVAILABLE: Final = "engine_unavailable"

_OtherThanTexts: TypeAlias = WorkerState | Accepted | TextFailed | Reply | Flushed

_encoder: Final = msgspec.msgpack.Encoder()

_ROWS_AT_A_TIME: Final = 32
"""Texts of a step that are passed on before others have their turn: so many take half a millisecond, and a request that
is none of them, such as a scrape of the metrics, must not wait for hundreds."""


class Tokenizers:
    """Binds one address for each worker. All methods belong to the event loop that called `start`."""

    def __init__(self, addresses: Sequence[str], stale_seconds: float, traffic: Traffic | None = None) -> None:
        assert addresses, "a frontend needs a tokenizer worker"
        self._addresses = addresses
        self._stale_seconds = stale_seconds
        self.traffic = traffic or Traffic(RequestLimits())
        self._context = zmq.asyncio.Context()
        self._links: list[_Link] = []
        self._closing: _Closing | None = None
        self._leaving: str | None = None

    def start(self) -> None:
        self._links = [_Link(self._context, address, self.traffic) for address in self._addresses]

    async def close(self) -> None:
        for link in self._links:
            await link.close()
        self._context.term()

    @property
    def model(self) -> ServedModel | None:
        """The model that is served, once a worker has been welcomed by the scheduler."""
        return next((link.model for link in self._links if link.model is not None), None)

    def not_ready(self) -> str | None:
        """Why no request can be served now; None when one can."""
        if self._closing is not None:
            return self._closing.message
        if self._leaving is not None:
            return self._leaving
        problems = [link.problem(self._stale_seconds) for link in self._links]
        return None if None in problems else problems[0]

    def submit(self, requests: Sequence[Generate]) -> ResponseStream:
        """Ask for an answer to each request; each is a choice. The caller calls `release` at the end, whatever that
        is. Raises ApiError when no worker can take it, too many requests wait already, or one is too large."""
        able = self._able()
        exchange = ResponseStream(len(requests))
        choices = self.traffic.admit(requests, exchange)
        # Behind admission: a copy of the prompt for each choice takes its time. All before the first is sent.
        try:
            frames = [_frame(request) for request in requests]
        except Exception:
            for progress in choices:
                self.traffic.released(progress)
            raise
        for choice, (request, frame, progress) in enumerate(zip(requests, frames, choices, strict=True)):
            min(able, key=lambda link: link.load).submit(request.id, frame, _Waiter(exchange, choice, progress))
        return exchange

    async def ask(self, question: Question) -> Reply:
        """Raises ApiError when no worker can answer, or for what it answers."""
        reply = await min(self._able(), key=lambda link: link.load).ask(question)
        assert not isinstance(reply, Flushed)
        return reply

    async def flush_cache(self) -> int:
        """Empty the scheduler's prefix cache; how many pages that freed. Raises ApiError."""
        reply = await self._able()[0].ask(Flush(secrets.token_bytes(REQUEST_ID_BYTES)))
        assert isinstance(reply, Flushed)
        return reply.pages

    def _able(self) -> list[_Link]:
        """The workers that can take requests."""
        if self._closing is not None:
            raise ApiError.of_code(self._closing.code, self._closing.message)
        able = [link for link in self._links if link.model is not None]
        if not able:
            raise ApiError.of_code(UNAVAILABLE, f"{self._links[0].problem(self._stale_seconds)}; try again in a moment")
        return able

    def release(self, exchange: ResponseStream) -> None:
        """Nobody waits for the answer any more: what has not ended is cancelled at once."""
        for link in self._links:
            link.release(exchange)

    def fail_all(self, code: str, message: str) -> None:
        """End every answer under way with an error and take no more requests."""
        self._closing = _Closing(code, message)
        for link in self._links:
            link.fail_all(code, message)

    def replicas(self) -> list[ReplicaView]:
        """What the workers know of the engines that they have found, by name and address. A replica is routable when
        some worker can send requests there, and waits for its files when some worker has them loaded."""
        merged: dict[str, ReplicaView] = {}
        for state in (state for link in self._links for state in link.replicas):
            known = merged.get(state.address)
            if known is None or _nearness(state) > _nearness(known):
                merged[state.address] = state
        return sorted(merged.values(), key=lambda state: (state.replica or state.address, state.address))

    @property
    def is_leaving(self) -> bool:
        return self._leaving is not None or self._closing is not None

    def leave(self, message: str) -> None:
        """Not ready any more, so that nobody new is sent here; who comes all the same is still served."""
        self._leaving = message

    def refuse_new(self, code: str, message: str) -> None:
        """Take no more requests; those under way go on."""
        self._closing = _Closing(code, message)


def _nearness(state: ReplicaView) -> tuple[bool, bool]:
    """How near to requests a replica is."""
    return state.routable, state.waits_for_files


def _frame(message: ToTokenizer) -> bytes:
    """Raises ApiError for one that is too large: whoever sends it loses the connection, and with it every request."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ApiError.of_code(
            "invalid_request", f"the request has more than {MAX_MESSAGE_BYTES >> 20} MiB: shorten it"
        )
    return frame


class _Closing(msgspec.Struct, frozen=True):
    """Why no request is taken any more."""

    code: str
    message: str


class _Waiter(msgspec.Struct, frozen=True):
    exchange: ResponseStream
    choice: int
    progress: Progress


class _Link:
    """One worker. Its requests live and die with the connection."""

    def __init__(self, context: zmq.asyncio.Context, address: str, traffic: Traffic) -> None:
        self._traffic = traffic
        self.model: ServedModel | None = None
        self.replicas: tuple[ReplicaView, ...] = ()
        self._reason = "no tokenizer worker has connected yet"
        self._heard = 0.0
        self._retried = 0
        self._lost_at = -math.inf
        """As `time.monotonic` says it."""
        self._waiters: dict[bytes, _Waiter] = {}
        self._questions: dict[bytes, asyncio.Future[Reply | Flushed]] = {}
        self._codec: Codec[FromTokenizer] = Codec(FromTokenizer)
        self._socket = open_socket(context, zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    @property
    def load(self) -> int:
        return len(self._waiters)

    def problem(self, stale_seconds: float) -> str | None:
        if self.model is None:
            return self._reason
        silent = asyncio.get_running_loop().time() - self._heard
        return f"the engine has said nothing for {silent:.0f} s" if silent > stale_seconds else None

    def submit(self, request_id: bytes, frame: bytes, waiter: _Waiter) -> None:
        self._waiters[request_id] = waiter
        self._send(frame)

    async def ask(self, question: Question | Flush) -> Reply | Flushed:
        """Raises ApiError."""
        frame = _frame(question)
        reply: asyncio.Future[Reply | Flushed] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = reply
        self._send(frame)
        try:
            return await reply
        finally:
            del self._questions[question.id]

    def release(self, exchange: ResponseStream) -> None:
        if exchange.ended:
            return
        for request_id in [known for known, waiter in self._waiters.items() if waiter.exchange is exchange]:
            self._traffic.released(self._waiters.pop(request_id).progress)
            self._send(_frame(Cancel(request_id)))

    def fail_all(self, code: str, message: str) -> None:
        waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            self._fail(waiter, ApiError.of_code(code, message))
            self._send(_frame(Cancel(request_id)))
        for reply in self._questions.values():
            if not reply.done():
                reply.set_exception(ApiError.of_code(code, message))

    async def close(self) -> None:
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _send(self, frame: bytes) -> None:
        # Sent at once as long as the worker's queue has room; otherwise in order, as soon as it has.
        self._socket.send(frame)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = self._codec.decode(frame)
                if isinstance(message, Texts):
                    await self._on_texts(message)
                else:
                    self._on_message(message)
            except (WireError, msgspec.ValidationError) as error:
                self._lose(f"a tokenizer worker sent a message that cannot be understood: {error}")

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose("the connection to a tokenizer worker was lost")

    async def _on_texts(self, message: Texts) -> None:
        """Raises ValidationError before anything of it has had an effect."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for row, (request_id, text) in enumerate(message.rows()):
            if row and not row % _ROWS_AT_A_TIME:
                await asyncio.sleep(0)
                now = loop.time()
            if (waiter := self._waiters.get(request_id)) is not None:
                scored = message.scored.get(row, ())
                self._traffic.tokens(waiter.progress, message.counts[row], len(text), now)
                waiter.exchange.push(waiter.choice, text, message.counts[row], scored)
        for finished in message.finished:
            if (waiter := self._waiters.pop(finished.id, None)) is not None:
                self._traffic.finished(waiter.progress, finished, now)
                waiter.exchange.finish(waiter.choice, finished)

    def _on_message(self, message: _OtherThanTexts) -> None:
        match message:
            case Accepted():
                if (waiter := self._waiters.get(message.id)) is not None:
                    now = asyncio.get_running_loop().time()
                    self._traffic.accepted(waiter.progress, message.prompt_tokens, now)
                    waiter.exchange.accept(waiter.choice, message.prompt_tokens)
            case TextFailed():
                if (waiter := self._waiters.pop(message.id, None)) is not None:
                    self._fail(waiter, ApiError.of_code(message.code, message.message, message.param))
                elif (reply := self._questions.get(message.id)) is not None and not reply.done():
                    reply.set_exception(ApiError.of_code(message.code, message.message, message.param))
            case Encoded() | Decoded() | Described() | Flushed():
                if (reply := self._questions.get(message.id)) is not None and not reply.done():
                    reply.set_result(message)
            case WorkerState():
                self._on_state(message)

    def _fail(self, waiter: _Waiter, error: ApiError) -> None:
        self._traffic.failed(waiter.progress, error)
        waiter.exchange.fail(error)

    def _on_state(self, state: WorkerState) -> None:
        if state.at <= self._lost_at:
            # Of a worker that is gone: it was read late, and nothing else will be heard of it.
            return
        self._heard = asyncio.get_running_loop().time()
        if state.version not in (TEXT_WIRE_VERSION, TEXT_WIRE_VERSION - 1):
            self._lose(f"the tokenizer worker speaks version {state.version}, not {TEXT_WIRE_VERSION}: update it")
            return
        self.model = state.model
        self.replicas = state.replicas
        self._reason = state.reason
        # One that has started anew counts from 0.
        self._traffic.metrics.retried += state.retried - (self._retried if state.retried >= self._retried else 0)
        self._retried = state.retried
        self._traffic.engine(state.model, state.status, self._heard)

    def _lose(self, reason: str) -> None:
        logger.error("%s; %d requests fail", reason, len(self._waiters))
        self.model = None
        self.replicas = ()
        self._reason = reason
        self._lost_at = time.monotonic()
        self.fail_all(UNAVAILABLE, reason)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the link to a tokenizer worker broke", exc_info=error)
            self._lose("the link to a tokenizer worker broke")
