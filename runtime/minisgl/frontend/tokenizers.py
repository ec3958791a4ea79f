"""The frontend's links to its tokenizer workers: which of them can serve, and which choice waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from minisgl.frontend.errors import ENGINE_UNAVAILABLE, ApiError, NotTaken
from minisgl.frontend.server.held_requests import Held
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.response_stream import Choice, ResponseStream
from minisgl.wire.messages import REQUEST_ID_BYTES, Flush, Flushed
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, Codec, WireError, open_socket
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import (
    NOT_TAKEN,
    TEXT_WIRE_VERSION,
    Accepted,
    Cancel,
    CheckConstraints,
    CheckedConstraints,
    ConstraintProblem,
    Continued,
    Decoded,
    Described,
    Encoded,
    FromTokenizer,
    Generate,
    Question,
    Reply,
    RequestsWait,
    ServedModel,
    StructuredOutput,
    TextFailed,
    Texts,
    ToTokenizer,
    WorkerState,
)

logger = logging.getLogger(__name__)

_Answer: TypeAlias = Reply | CheckedConstraints | Flushed
"""Answer to a question."""
_OtherThanTexts: TypeAlias = WorkerState | Accepted | Continued | TextFailed | _Answer

_encoder: Final = msgspec.msgpack.Encoder()

_MORE_THAN_TEXT: Final = ("scored", "reasoning", "tool_calls", "token_ids", "prompt_scored")
"""Columns of `Texts` with output beside the text, by row."""

OPERATOR_SILENCE_SECONDS: Final = 30.0
"""Time after the operator's last word from which a model counts as one that shall serve."""
NOT_SERVING_MESSAGE: Final = (
    "the model is suspended or has no replicas; change spec.suspend or spec.replicas to start it"
)

_AT_A_TIME: Final = 32
"""Messages of a worker, or texts or ends of a step, that are passed on before other tasks run: that many take one
millisecond, and other requests, such as a scrape of the metrics, must not wait for hundreds."""
_CHOICES_AT_A_TIME: Final = 16
"""Choices that a tenant submits before other tasks run; as long."""


class TokenizerPool:
    """Binds one address for each worker. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        addresses: Sequence[str],
        stale_seconds: float,
        requests: RequestTracker,
        *,
        ready_before_engine: bool = False,
        names: tuple[str, ...] = (),
    ) -> None:
        """`ready_before_engine`: report ready before the first model is known. `names`: those of the model, if they are
        known before it is."""
        assert addresses, "a frontend needs a tokenizer worker"
        self._addresses = addresses
        self._stale_seconds = stale_seconds
        self.requests = requests
        self._context = zmq.asyncio.Context()
        self._links: list[_Link] = []
        self._ready_before_engine = ready_before_engine
        self._names = names
        self._rejection: tuple[str, str] | None = None
        """Code and message for new requests while none is taken."""
        self._closed: tuple[str, str] | None = None
        """Code and message for all requests, those included that were held."""
        self._not_serving_until = -math.inf
        """Until then the operator's word counts that the model shall not serve."""
        self._draining: str | None = None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of each tenant that submits a request with many choices: one such request at a time."""

    def start(self) -> None:
        self._links = [_Link(self._context, address, self.requests, self._on_state) for address in self._addresses]

    async def close(self) -> None:
        for link in self._links:
            await link.close()
        self._context.term()

    @property
    def model(self) -> ServedModel | None:
        """The served model; None until a scheduler has welcomed a worker."""
        return next((link.model for link in self._links if link.model is not None), None)

    @property
    def knows_load(self) -> bool:
        """Whether a worker has learned the load of the engines, from their status or because there is no engine. It
        stays known while engines come and go, until the worker is lost."""
        return any(link.knows_load for link in self._links)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model that is served, or was served last, or that engines will serve; empty: none is known."""
        model = self.model or self.requests.model
        return self._names if model is None else model.all_names

    def not_ready_reason(self) -> str | None:
        """Return why no request can be served now; None when one can."""
        if self._rejection is not None:
            return self._rejection[1]
        if self._draining is not None:
            return self._draining
        if self.is_suspended:
            return NOT_SERVING_MESSAGE
        needs_model = not (self._ready_before_engine or self.requests.model is not None)
        problems = [link.problem(self._stale_seconds, needs_model=needs_model) for link in self._links]
        return None if None in problems else problems[0]

    def unavailable_reason(self) -> str | None:
        """Return why no engine can take a request now; None when one can."""
        problems = [link.problem(self._stale_seconds) for link in self._links]
        return None if None in problems else problems[0]

    @property
    def is_suspended(self) -> bool:
        """Whether the operator has said lately that the model shall not serve."""
        return asyncio.get_running_loop().time() < self._not_serving_until

    def set_serving(self, serving: bool) -> None:
        """Take the operator's word whether the model shall serve. It counts for OPERATOR_SILENCE_SECONDS."""
        if serving:
            self._not_serving_until = -math.inf
            return
        self._not_serving_until = asyncio.get_running_loop().time() + OPERATOR_SILENCE_SECONDS
        if self.model is None:
            self.requests.held.fail_all(_not_serving())

    @property
    def num_held(self) -> int:
        """Number of requests that wait because no engine is routable, here and in workers."""
        return len(self.requests.held) + sum(link.parked for link in self._links)

    @property
    def must_hold(self) -> bool:
        """Whether a new request has to wait for an engine, or behind others that do."""
        return self.model is None or len(self.requests.held) > 0

    def hold(self, size: int, tenant: str) -> Held:
        """Let a tenant's request with a body of `size` bytes wait until it may be submitted. The caller must release
        it. Raises ApiError when new requests are rejected, when the model shall not serve, or when there is no room."""
        self.check_open()
        self.check_serving()
        return self.requests.held.hold(size, tenant)

    def check_serving(self) -> None:
        """Raises ApiError when no engine is routable and the model shall not serve."""
        if self.model is None and self.is_suspended:
            raise _not_serving()

    def check_open(self) -> None:
        """Raises ApiError when new requests are rejected."""
        if self._rejection is not None:
            raise ApiError.from_code(*self._rejection)

    async def submit(
        self, record: RequestRecord, requests: Sequence[Generate], n: int, held: Held | None = None
    ) -> ResponseStream:
        """Send the choices of a request, `n` for each prompt, to workers. The caller must `release` the stream. Raises
        ApiError when no worker is available, too many requests wait, or one is too large. `held`: it was taken before,
        and is not rejected."""
        self._available_links(was_held=held is not None)
        # Before encoding a copy of the prompt for each choice, which takes time.
        stream = self.requests.admit(record, requests, n, held)
        try:
            if len(requests) <= _CHOICES_AT_A_TIME:
                self._send(stream.choices, [_frame(request) for request in requests])
            else:
                await self._send_in_turn(stream, requests)
        except BaseException:
            self.release(stream)
            raise
        return stream

    async def _send_in_turn(self, stream: ResponseStream, requests: Sequence[Generate]) -> None:
        """Send some choices at a time, so that a request of another tenant waits for no more than these."""
        parts = [slice(n, n + _CHOICES_AT_A_TIME) for n in range(0, len(requests), _CHOICES_AT_A_TIME)]
        frames: list[bytes] = []
        async with self._turns.setdefault(stream.tenant, asyncio.Lock()):
            # Nothing of a request is sent that has a choice which is too large.
            for part in parts:
                frames += map(_frame, requests[part])
                await asyncio.sleep(0)
            for part in parts:
                self._send(stream.choices[part], frames[part])
                await asyncio.sleep(0)
                if stream.error is not None:
                    raise stream.error

    def _send(self, choices: Sequence[Choice], frames: Sequence[bytes]) -> None:
        links = self._available_links(was_held=True)
        for choice, frame in zip(choices, frames, strict=True):
            min(links, key=lambda link: link.load).submit(choice, frame)

    def release(self, stream: ResponseStream) -> None:
        """Cancel the choices that have not finished: the response is no longer needed."""
        for link in self._links:
            link.release(stream)
        self.requests.release(stream)

    async def ask(self, question: Question, tenant: str) -> Reply:
        """Raises ApiError when no worker is available, when too many texts wait, or when the reply is an error."""
        link = min(self._available_links(), key=lambda link: link.load)
        frame = _frame(question)
        with self.requests.admission.asking(len(frame), tenant):
            reply = await link.ask(question, frame)
        assert not isinstance(reply, CheckedConstraints | Flushed)
        return reply

    async def check_constraints(
        self, constraints: Sequence[StructuredOutput], *, was_held: bool = False
    ) -> tuple[ConstraintProblem | None, ...]:
        """Return the problem of each constraint in turn, up to the first one that has any. It needs no engine. Raises
        ApiError when new requests are rejected, when no worker is connected, or when one is lost meanwhile."""
        self._check_taken(was_held=was_held)
        connected = [link for link in self._links if link.is_connected]
        if not connected:
            raise ApiError.from_code(ENGINE_UNAVAILABLE, f"{self._links[0].problem(self._stale_seconds)}; retry")
        question = CheckConstraints(id=secrets.token_bytes(REQUEST_ID_BYTES), constraints=tuple(constraints))
        reply = await min(connected, key=lambda link: link.load).ask(question)
        assert isinstance(reply, CheckedConstraints)
        return reply.problems

    async def flush_cache(self) -> int:
        """Empty the scheduler's prefix cache. Returns the number of freed pages. Raises ApiError."""
        reply = await self._available_links()[0].ask(Flush(secrets.token_bytes(REQUEST_ID_BYTES)))
        assert isinstance(reply, Flushed)
        return reply.pages

    def _available_links(self, *, was_held: bool = False) -> list[_Link]:
        """Return the links to workers that can take requests. Raises ApiError when there are none."""
        self._check_taken(was_held=was_held)
        available = [link for link in self._links if link.model is not None]
        if not available:
            raise NotTaken(f"{self._links[0].problem(self._stale_seconds)}; retry")
        return available

    def _check_taken(self, *, was_held: bool) -> None:
        """Raises ApiError when requests of this kind are rejected."""
        if self._closed is not None:
            raise ApiError.from_code(*self._closed)
        if not was_held:
            self.check_open()

    def _on_state(self) -> None:
        """A link has news of its worker."""
        self.requests.held.set_open(self.model is not None)
        if self.model is None and self.is_suspended:
            self.requests.held.fail_all(_not_serving())
        # A worker without a routable engine reports its state at least twice a second: soon enough for each change.
        waits = self.num_held > 0 and not self.is_draining and not self.is_suspended
        for link in self._links:
            link.report_wait(waits)

    def fail_all(self, code: str, message: str) -> None:
        """End all responses in progress with an error and take no more requests."""
        self.reject_new(code, message)
        self._closed = (code, message)
        self.requests.held.fail_all(ApiError.from_code(code, message))
        for link in self._links:
            link.fail_all(code, message)

    def replicas(self) -> list[ReplicaView]:
        """Return the replicas that workers have discovered, by name and address. A replica is routable when some worker
        can send requests there, and awaits its files when some worker has them loaded."""
        states = (state for link in self._links for state in link.replicas)
        best: dict[str, ReplicaView] = {}
        for state in sorted(states, key=_usability, reverse=True):
            best.setdefault(state.address, state)
        return sorted(best.values(), key=lambda state: (state.replica or state.address, state.address))

    @property
    def is_draining(self) -> bool:
        return self._draining is not None or self._rejection is not None

    def start_draining(self, message: str) -> None:
        """Report not ready, so that new requests go elsewhere; those that still arrive are served."""
        self._draining = message
        # Polls that wait for a held request must not delay the end.
        self.requests.held.notify()

    def reject_new(self, code: str, message: str) -> None:
        """Take no more requests; running ones continue."""
        self._rejection = (code, message)


def _not_serving() -> ApiError:
    """Make the error for requests while the model shall not serve."""
    error = ApiError.from_code("not_serving", NOT_SERVING_MESSAGE)
    error.headers["retry-after"] = str(round(OPERATOR_SILENCE_SECONDS))
    return error


def _usability(state: ReplicaView) -> tuple[bool, bool]:
    """Sort key: a replica that can take requests is above one that only awaits its files."""
    return state.routable, state.waits_for_files


def _push_row(choice: Choice, text: str, message: Texts, row: int) -> None:
    """Pass on a row of a message in which some rows have more than text."""
    scored = message.scored.get(row, ())
    reasoning, calls = message.reasoning.get(row, ""), message.tool_calls.get(row, ())
    prompt_scored = message.prompt_scored.get(row, ())
    if reasoning or calls or prompt_scored or row in message.token_ids:
        token_ids = array("i", message.token_ids.get(row, b"")).tolist()
        choice.stream.push_step(choice, text, scored, reasoning, calls, token_ids, prompt_scored)
    else:
        choice.stream.push(choice, text, scored)


def _frame(message: ToTokenizer) -> bytes:
    """Raises ApiError for a message that is too large: sending it would lose the connection with all its requests."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ApiError.from_code("invalid_request", f"the request exceeds {MAX_MESSAGE_BYTES >> 20} MiB; shorten it")
    return frame


class _Link:
    """One worker. Its requests live and die with the connection."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, requests: RequestTracker, on_state: Callable[[], None]
    ) -> None:
        """`on_state` is called after each report of the worker, and after its loss."""
        self._requests = requests
        self._on_state_change = on_state
        self.model: ServedModel | None = None
        self.replicas: tuple[ReplicaView, ...] = ()
        self.parked = 0
        """Choices in the worker that wait for an engine."""
        self.knows_load = False
        """The worker has been connected to an engine, or has found that there is none."""
        self._reported_wait = False
        self._reason = "no tokenizer worker has connected yet"
        self.is_connected = False
        """The worker has reported its state since it was last lost."""
        self._last_state_at = 0.0
        self._resubmitted = 0
        self._lost_at = -math.inf
        """Time of the last loss, by `time.monotonic`."""
        self._choices: dict[bytes, Choice] = {}
        self._questions: dict[bytes, asyncio.Future[_Answer]] = {}
        self._codec: Codec[FromTokenizer] = Codec(FromTokenizer)
        self._socket = open_socket(context, zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    @property
    def load(self) -> int:
        return len(self._choices)

    def problem(self, stale_seconds: float, *, needs_model: bool = True) -> str | None:
        """Return why the worker cannot take requests; without a model it is well if it needs none."""
        if self.model is None and (needs_model or not self.is_connected):
            return self._reason
        silent = asyncio.get_running_loop().time() - self._last_state_at
        return f"no status from the engine for {silent:.0f} s" if silent > stale_seconds else None

    def submit(self, choice: Choice, frame: bytes) -> None:
        self._choices[choice.request_id] = choice
        self._send(frame)

    async def ask(self, question: Question | CheckConstraints | Flush, frame: bytes | None = None) -> _Answer:
        """`frame`: the question as it is sent. Raises ApiError."""
        frame = _frame(question) if frame is None else frame
        reply: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = reply
        self._send(frame)
        try:
            return await reply
        finally:
            del self._questions[question.id]

    def release(self, stream: ResponseStream) -> None:
        for choice in stream.choices:
            if self._choices.pop(choice.request_id, None) is not None:
                self._send(_frame(Cancel(choice.request_id)))

    def report_wait(self, waits: bool) -> None:
        """Tell the worker whether requests wait for an engine, if it does not know yet."""
        if waits != self._reported_wait and self.is_connected:
            self._reported_wait = waits
            self._send(_frame(RequestsWait(waits)))

    def fail_all(self, code: str, message: str) -> None:
        choices, self._choices = self._choices, {}
        for request_id, choice in choices.items():
            self._requests.fail(choice, ApiError.from_code(code, message))
            self._send(_frame(Cancel(request_id)))
        for reply in self._questions.values():
            if not reply.done():
                reply.set_exception(ApiError.from_code(code, message))

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
        # Sent immediately as long as the worker's queue has room; otherwise in order, as soon as it has.
        self._socket.send(frame)

    async def _read(self) -> None:
        for number in itertools.count(1):
            # It does not suspend the task while messages are there.
            frame = await self._socket.recv()
            if not number % _AT_A_TIME:
                await asyncio.sleep(0)
            try:
                message = self._codec.decode(frame)
                if isinstance(message, Texts):
                    await self._on_texts(message)
                else:
                    self._on_message(message)
            except (WireError, msgspec.ValidationError) as error:
                self._lose(f"a tokenizer worker sent an invalid message: {error}")

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose("the connection to a tokenizer worker was lost")

    async def _on_texts(self, message: Texts) -> None:
        """Raises ValidationError before any of it has had an effect."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        text_only = not any(getattr(message, column) for column in _MORE_THAN_TEXT)
        for request_id, first in message.first_tokens.items():
            if (choice := self._choices.get(request_id)) is not None:
                self._requests.start_at_engine(choice, first, now)
        rows = message.rows()
        # Tokens that come together have one gap before them: the first row of a request counts those of all its rows.
        counts = dict(zip([request_id for request_id, _ in rows], message.counts, strict=True))
        for row, (request_id, text) in enumerate(rows):
            if row and not row % _AT_A_TIME:
                await asyncio.sleep(0)
                now = loop.time()
            if (choice := self._choices.get(request_id)) is not None:
                self._requests.count_tokens(choice, counts.pop(request_id, 0), now)
                if text_only:
                    choice.stream.push(choice, text, ())
                else:
                    _push_row(choice, text, message, row)
        for number, finished in enumerate(message.finished):
            if number and not number % _AT_A_TIME:
                await asyncio.sleep(0)
                now = loop.time()
            if (choice := self._choices.pop(finished.id, None)) is not None:
                self._requests.finish(choice, finished, now)

    def _on_message(self, message: _OtherThanTexts) -> None:
        match message:
            case Accepted():
                if (choice := self._choices.get(message.id)) is not None:
                    ids, now = array("i", message.prompt_token_ids), asyncio.get_running_loop().time()
                    choice.stream.ignored = message.ignored
                    self._requests.accept(choice, message.prompt_tokens, now, tuple(ids))
            case Continued():
                if (choice := self._choices.get(message.id)) is not None:
                    self._requests.resume(choice, asyncio.get_running_loop().time())
            case TextFailed():
                if message.code == NOT_TAKEN:
                    error: ApiError = NotTaken(message.message)
                else:
                    error = ApiError.from_code(message.code, message.message, message.param)
                if (choice := self._choices.pop(message.id, None)) is not None:
                    self._requests.fail(choice, error)
                elif (reply := self._questions.get(message.id)) is not None and not reply.done():
                    reply.set_exception(error)
            case Encoded() | Decoded() | Described() | CheckedConstraints() | Flushed():
                if (reply := self._questions.get(message.id)) is not None and not reply.done():
                    reply.set_result(message)
            case WorkerState():
                self._on_state(message)

    def _on_state(self, state: WorkerState) -> None:
        if state.at <= self._lost_at:
            # Read late, from a worker that is lost; nothing else will arrive from it.
            return
        self._last_state_at = asyncio.get_running_loop().time()
        if state.version != TEXT_WIRE_VERSION:
            self._lose(f"the tokenizer worker's wire version is {state.version}, not {TEXT_WIRE_VERSION}; update it")
            return
        self.is_connected = True
        if self.model is None or state.model is None:
            for choice in self._choices.values():
                self._requests.wait_anew(choice, self._last_state_at)
        self.model = state.model
        self.replicas = state.replicas
        if state.parked > self.parked:
            self._requests.held.notify()
        self.parked = state.parked
        self.knows_load |= state.status is not None or state.no_engines
        self._reason = state.reason
        # A restarted worker counts from 0.
        before = self._resubmitted if state.retried >= self._resubmitted else 0
        self._requests.metrics.resubmitted.value += state.retried - before
        self._resubmitted = state.retried
        self._requests.update_engine(state.model, state.status, self._last_state_at)
        self._requests.count_starts(state.replicas)
        self._on_state_change()

    def _lose(self, reason: str) -> None:
        logger.error("%s; %d requests fail", reason, len(self._choices))
        self.model = None
        self.replicas = ()
        self.parked = 0
        self.knows_load = False
        self._reported_wait = False
        self.is_connected = False
        self._reason = reason
        self._lost_at = time.monotonic()
        self.fail_all(ENGINE_UNAVAILABLE, reason)
        self._on_state_change()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the link to a tokenizer worker broke", exc_info=error)
            self._lose("the link to a tokenizer worker broke")
