"""The requests that are under way: what each is waiting for, and what becomes of it. Metrics, limits, the access log
and the administration all read it here.

Who serves a request tells nothing of this kind: the record of the HTTP request that a task works for is in the task's
context, and tokenizer links report what arrives for it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final, Literal

import msgspec
from starlette.datastructures import Headers

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.metrics.metrics import Metrics
from minisgl.frontend.server import access_log
from minisgl.frontend.server.admission import Admission
from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.wire.messages import Status
from minisgl.wire.text import Finished, Generate, ServedModel

Phase = Literal["reading", "tokenizing", "waiting", "generating"]
PHASES: Final[tuple[Phase, ...]] = ("reading", "tokenizing", "waiting", "generating")
"""Of the body; until the scheduler has queued it; until its first token; until its end."""


_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE: Final = re.compile(r"[\x20-\x7e]{1,128}")


class RequestRecord(msgspec.Struct, eq=False, kw_only=True):
    """One HTTP request. Times are the event loop's, in seconds."""

    request_id: str
    answer_id: str = ""
    """The id in the answer's body, once it has one."""
    method: str
    path: str
    began: float
    headers: dict[str, str] = {}
    """Those that the access log repeats."""
    key: str = ""
    """Name of the API key's holder."""
    phase: Phase = "reading"
    status: int = 0
    error_code: str = ""
    answer_complete: bool = False
    gone_in: Phase | None = None
    """Where the client left before its answer was complete."""
    exchange: ResponseStream | None = None
    to_accept: int = 0
    accepted_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    """When the engine last gave something."""
    model: str = ""
    """As the client calls it."""
    n: int = 1
    """Choices for each prompt."""
    queue_seconds: float | None = None
    """That its last choice waited for a place in the batch; None: not known."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = []
    sending_since: float = 0.0
    """0: nothing is being sent."""
    unsent: int = 0
    """Characters that arrived since then."""
    drop: Callable[[], None] | None = None
    """Closes the connection at once."""

    def fail(self, error: ApiError) -> None:
        if self.exchange is not None:
            self.error_code = error.code
            self.exchange.fail(error)


def new_record(method: str, path: str, headers: Headers, began: float) -> RequestRecord:
    """With the client's `x-request-id`, or a new one."""
    given = headers.get("x-request-id", "")
    logged = {}
    for header, field in access_log.LOGGED_HEADERS.items():
        value = headers.get(header)
        if value is not None and _TRACE.fullmatch(value):
            logged[field] = value
    return RequestRecord(
        request_id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16),
        method=method,
        path=path,
        began=began,
        headers=logged,
    )


class Progress(msgspec.Struct, eq=False):
    """One choice of a request."""

    record: RequestRecord
    prompt_tokens: int
    """A guess until it is accepted."""
    first: bool
    """Of the choices that its prompt has."""
    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    waits: bool = True


current: ContextVar[RequestRecord | None] = ContextVar("request", default=None)
"""What the running task works for."""


def name_answer(answer_id: str) -> None:
    """The answer to the request that the running task serves has this id."""
    if (record := current.get()) is not None:
        record.answer_id = answer_id


def describe_request(model: str, n: int) -> None:
    """The request that the running task serves is for this model, and for so many choices of each prompt."""
    if (record := current.get()) is not None:
        record.model = model
        record.n = n


class Traffic:
    """All methods belong to the event loop."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.metrics = Metrics()
        self.admission = Admission(limits)
        self.in_flight: set[RequestRecord] = set()
        self.status: Status | None = None
        """The scheduler's last word."""
        self.model: ServedModel | None = None
        self._stepped_at = 0.0

    def begin(self, record: RequestRecord) -> None:
        self.in_flight.add(record)

    def end(self, record: RequestRecord, now: float) -> None:
        self.in_flight.discard(record)
        metrics = self.metrics
        if record.gone_in is not None:
            metrics.disconnects[record.gone_in] += 1
            if record.exchange is not None:
                metrics.finished["abort"] += 1
        elif record.error_code:
            metrics.failed[record.error_code] += 1
        access_log.write(record, now)

    def admit(self, requests: Sequence[Generate], exchange: ResponseStream) -> list[Progress]:
        """Let the choices of a request wait. Raises ApiError when too many do."""
        guesses = [_guess(request) for request in requests]
        self.admission.admit(len(requests), sum(guesses))
        record = current.get()
        if record is None:
            record = RequestRecord(request_id="", method="", path="", began=asyncio.get_running_loop().time())
        record.exchange = exchange
        record.phase = "tokenizing"
        record.to_accept = len(requests)
        return [Progress(record, guess, number % record.n == 0) for number, guess in enumerate(guesses)]

    def accepted(self, choice: Progress, prompt_tokens: int, now: float) -> None:
        record = choice.record
        if choice.waits:
            self.admission.corrected(prompt_tokens - choice.prompt_tokens)
        choice.prompt_tokens = prompt_tokens
        if choice.first:
            self.metrics.prompt_tokens_total += prompt_tokens
        record.to_accept -= 1
        if not record.to_accept and record.phase == "tokenizing":
            record.phase = "waiting"
            record.accepted_at = now
            self.metrics.accept_time.observe(now - record.began)

    def tokens(self, choice: Progress, tokens: int, characters: int, now: float) -> None:
        """The choice has `tokens` in all now, and so many characters more."""
        if not tokens:
            # The prompt's own text, echoed.
            return
        record = choice.record
        if choice.waits:
            self._start(choice, now)
            self.metrics.time_to_first_token.observe(now - record.began)
            record.first_at = record.first_at or now
        elif tokens > choice.tokens:
            # Text that was held back arrives with several tokens; they share the time.
            new = tokens - choice.tokens
            self.metrics.inter_token_latency.observe((now - choice.last_at) / new, new)
        choice.tokens = tokens
        choice.last_at = record.last_at = now
        if record.sending_since:
            record.unsent += characters

    def finished(self, choice: Progress, end: Finished, now: float) -> None:
        if end.completion_tokens > choice.tokens:
            self.tokens(choice, end.completion_tokens, 0, now)
        elif choice.waits:
            # Nobody asked for a token: only the prompt was scored.
            self._start(choice, now)
        record, metrics = choice.record, self.metrics
        record.prompt_tokens += end.prompt_tokens
        record.cached_tokens += end.cached_tokens
        record.completion_tokens += end.completion_tokens
        record.finish_reasons = [*record.finish_reasons, end.reason]
        metrics.finished[end.reason] += 1
        if choice.first:
            metrics.prompt_tokens.observe(end.prompt_tokens)
        metrics.generation_tokens.observe(end.completion_tokens)
        if end.wait is not None:
            record.queue_seconds = max(record.queue_seconds or 0.0, end.wait.queue)
            metrics.prefill_time.observe(end.wait.prefill)
        metrics.request_latency.observe(now - record.began)
        metrics.decode_time.observe(now - choice.first_at)
        if end.completion_tokens > 1:
            metrics.time_per_output_token.observe((now - choice.first_at) / (end.completion_tokens - 1))

    def _start(self, choice: Progress, now: float) -> None:
        """The choice waits no more: the engine has computed its prompt."""
        choice.waits = False
        choice.first_at = choice.record.last_at = now
        choice.record.phase = "generating"
        self.admission.started(choice.prompt_tokens)

    def failed(self, choice: Progress, error: ApiError) -> None:
        if error.code == "queue_full":
            self.admission.rejected_below(error)
        choice.record.error_code = choice.record.error_code or error.code
        self.released(choice)

    def released(self, choice: Progress) -> None:
        """Nobody waits for the choice any more. A second time does nothing."""
        if choice.waits:
            choice.waits = False
            self.admission.gone(1, choice.prompt_tokens)

    def engine(self, model: ServedModel | None, status: Status | None, now: float) -> None:
        """What a tokenizer worker says of the engine."""
        if model is not None and (self.model is None or self.model.epoch != model.epoch):
            self.metrics.engine_starts += 1
            self.model = model
        if status is None or self.status is None or status.steps != self.status.steps or not status.running:
            self._stepped_at = now
        self.status = status

    def step_age(self, now: float) -> float:
        """How long there has been work without a step; 0 without work."""
        busy = self.status is not None and self.status.running
        return now - self._stepped_at if busy else 0.0

    def phases(self) -> dict[str, int]:
        now = [record.phase for record in self.in_flight]
        return {phase: now.count(phase) for phase in PHASES}


def _guess(request: Generate) -> int:
    """Tokens of a prompt that is not encoded yet: most text has four characters in one."""
    if request.tokens is not None:
        return len(request.tokens) // 4
    if request.messages is not None:
        return sum(len(message.content or "") for message in request.messages) // 4 + len(request.messages)
    return len(request.prompt or "") // 4 + 1
