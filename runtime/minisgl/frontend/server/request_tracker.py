"""All requests in progress and the state of the engine behind them: what metrics, limits and the admin API read.

Links to tokenizer workers report here what arrives for a choice; it is measured and passed on to its response stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from minisgl.frontend.config import RequestLimits, TraceOptions
from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.metrics.counters import FrontendMetrics
from minisgl.frontend.server import access_log
from minisgl.frontend.server.admission import Admission
from minisgl.frontend.server.held_requests import Held, HeldRequests
from minisgl.frontend.server.known_gateways import KnownGateways
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_spans import request_spans
from minisgl.frontend.server.response_stream import (
    NO_STREAM,
    PHASES,
    Choice,
    EngineStart,
    Phase,
    ResponseStream,
)
from minisgl.frontend.tracing.tracer import Tracer, create_tracer
from minisgl.wire.messages import Status
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import Finished, FirstTokenFrom, Generate, ServedModel


class RequestTracker:
    """All methods belong to the event loop; `now` is its time, in seconds."""

    def __init__(self, limits: RequestLimits, traces: TraceOptions | None = None, service: str = "") -> None:
        """`service`: name of the process in traces; `traces`: None for no traces."""
        self.limits = limits
        self.metrics = FrontendMetrics()
        self.tracer: Tracer | None = None
        if traces is not None:
            self.tracer = create_tracer(traces, service, self.metrics.spans_dropped)
        self.admission = Admission(limits, self.metrics.rejections)
        self.held = HeldRequests(self.admission, limits.held_bytes)
        self.in_flight: set[RequestRecord] = set()
        self.gateways = KnownGateways()
        self.status: Status | None = None
        """Last status of the scheduler."""
        self.model: ServedModel | None = None
        self._epochs: dict[str, tuple[int, int]] = {}
        """Latest epoch of each replica that was seen."""
        self._stepped_at = 0.0
        self._generations = 0
        self._last_end = time.monotonic()
        """Time at which the last generation request ended; at first, of the start."""
        self._phases: Counter[Phase] = Counter()
        """Response streams of the requests in flight, counted as they change, so that no scrape visits them all."""

    def end(self, record: RequestRecord, now: float) -> None:
        """Count and log a request, in flight or rejected before."""
        self.in_flight.discard(record)
        metrics = self.metrics
        if record.stream is not None:
            self._phases[record.stream.phase] -= 1
        if record.stream is not None and isinstance(record.stream.error, ApiError) and not record.error_code:
            # The task that writes the stream may have been cancelled before it met the error.
            record.error_code, record.error_status = record.stream.error.code, record.stream.error.status
        if record.disconnected_in is not None:
            metrics.disconnects[record.disconnected_in] += 1
            if record.stream is not None:
                metrics.finished["abort"] += 1
        elif record.error_code:
            metrics.failed[record.error_code] += 1
            if record.stream is not None and record.error_status >= 500:
                metrics.finished["error"] += 1
        if record.status and record.path not in access_log.NOT_LOGGED:
            metrics.http.observe(record.route, record.route_method, record.status, now - record.started_at)
        access_log.write(record, now)
        if record.trace is not None and self.tracer is not None:
            self.tracer.end(record.trace, request_spans(record, record.trace, now), now)
        # Its scope is part of a cycle. What that holds stays until garbage is collected, while all requests wait: 25 ms
        # with 5,000 choices.
        record.stream = None

    def begin_generation(self) -> None:
        """Count a valid generation request."""
        self._generations += 1

    def end_generation(self, now: float) -> None:
        self._generations -= 1
        self._last_end = now

    @property
    def running(self) -> int:
        """Number of generation requests in progress that are not held."""
        return self._generations - len(self.held)

    def idle_seconds(self, now: float) -> float:
        """Seconds since the last generation request ended; 0 while one is in progress."""
        return 0.0 if self._generations else now - self._last_end

    def admit(
        self, record: RequestRecord, requests: Sequence[Generate], n: int, held: Held | None = None
    ) -> ResponseStream:
        """Open the response stream of a request, which may have been held: one choice for each of `requests`, `n` for
        each prompt. Raises ApiError when too many wait."""
        choices = [(request.id, _estimate_prompt_tokens(request)) for request in requests]
        self.admission.recount(record.key_name, record.choices, len(choices))
        record.choices = len(choices)
        tokens = sum(tokens for _, tokens in choices)
        is_pooled = requests[0].pooling is not None
        self.admission.admit(len(choices), tokens, record.tenant, was_held=held is not None, by_tokens=is_pooled)
        if held is not None:
            self.held.release(held)
        record.stream = ResponseStream(record.started_at, choices, n, requests[0].params.max_tokens)
        record.stream.tenant = record.tenant
        record.stream.is_pooled = is_pooled
        self._phases[record.stream.phase] += 1
        return record.stream

    def withdraw(self, record: RequestRecord) -> None:
        """Forget the stream of a request that no worker has taken."""
        if record.stream is not None:
            self._phases[record.stream.phase] -= 1
            record.stream = None

    def accept(self, choice: Choice, prompt_tokens: int, now: float, prompt_token_ids: Sequence[int] = ()) -> None:
        """The scheduler has queued the choice."""
        stream = choice.stream
        if choice.waiting:
            self.admission.correct_tokens(prompt_tokens - choice.prompt_tokens, stream.tenant)
        if choice.index % stream.n == 0:
            self.metrics.prompt_tokens_total.value += prompt_tokens
        stream.accept(choice, prompt_tokens, prompt_token_ids)
        if stream.is_accepted and stream.phase == "tokenizing":
            self._enter_phase(stream, "waiting")
            stream.accepted_at = stream.queued_since = now
            self.metrics.accept_time.observe(now - stream.started_at)

    def resume(self, choice: Choice, now: float) -> None:
        """An engine has queued the rest of an answer whose engine was lost."""
        self.metrics.continued.value += 1
        choice.resumes = True
        # The engine has as much time for its next token as for a first one.
        choice.stream.last_progress_at = now
        choice.stream.mark_continued()

    def start_at_engine(self, choice: Choice, first: FirstTokenFrom, now: float) -> None:
        """An engine has given its first token of a choice whose request is recorded."""
        choice.starts.append(EngineStart(first.engine, first.wait, first.cause, now, choice.last_token_at))

    def wait_anew(self, choice: Choice, now: float) -> None:
        """The choice has no engine, or one has just come, which has as much time for it as for a new request."""
        choice.stream.last_progress_at = choice.stream.queued_since = now

    def count_tokens(self, choice: Choice, tokens: int, now: float) -> None:
        """The choice has `tokens` in all now; 0: only the echoed prompt has arrived."""
        if not tokens:
            return
        stream = choice.stream
        if choice.waiting:
            self._start(choice, now)
            self.metrics.time_to_first_token.observe(now - stream.started_at)
            stream.first_token_at = stream.first_token_at or now
        elif tokens > choice.tokens:
            # Text that was held back arrives with several tokens; they share the time.
            new = tokens - choice.tokens
            self.metrics.inter_token_latency.observe((now - choice.last_token_at) / new, new)
            if choice.resumes:
                choice.resumes = False
                self.metrics.continue_gap.observe(now - choice.last_token_at)
        choice.tokens = tokens
        choice.last_token_at = stream.last_token_at = stream.last_progress_at = now

    def finish(self, choice: Choice, end: Finished, now: float) -> None:
        if end.completion_tokens > choice.tokens:
            self.count_tokens(choice, end.completion_tokens, now)
        elif choice.waiting:
            # The request has max_tokens 0: only the prompt was scored.
            self._start(choice, now)
        stream, metrics = choice.stream, self.metrics
        metrics.finished[end.reason] += 1
        if choice.index % stream.n == 0:
            metrics.prompt_tokens.observe(end.prompt_tokens)
            computed = end.prompt_tokens - end.cached_tokens
            metrics.computed_tokens.observe(computed)
            metrics.cached_tokens.value += end.cached_tokens
            metrics.prompt_tokens_by_source["local_compute"] += computed
            metrics.prompt_tokens_by_source["local_cache_hit"] += end.cached_tokens
            metrics.cached_tokens_by_source["device"] += end.cached_tokens
        metrics.preemptions.observe(end.preemptions)
        if end.wait is not None:
            metrics.prefill_time.observe(end.wait.prefill)
            metrics.inference_time.observe(end.wait.prefill + now - choice.first_token_at)
        metrics.request_latency.observe(now - stream.started_at)
        if not stream.is_pooled:
            self._count_answer(choice, end, now)
        stream.finish(choice, end)
        first = choice.index - choice.index % stream.n
        siblings = stream.choices[first : first + stream.n]
        if not stream.is_pooled and all(one.finished is not None for one in siblings):
            metrics.max_generation_tokens.observe(max(one.tokens for one in siblings))

    def _count_answer(self, choice: Choice, end: Finished, now: float) -> None:
        """Count what only generated answers have."""
        stream, metrics = choice.stream, self.metrics
        if choice.index % stream.n == 0:
            metrics.params_n.observe(stream.n)
        metrics.generation_tokens.observe(end.completion_tokens)
        max_tokens = stream.max_tokens
        if max_tokens is None and self.model is not None:
            max_tokens = self.model.card.max_model_len - end.prompt_tokens
        if max_tokens is not None:
            metrics.params_max_tokens.observe(max_tokens)
        metrics.decode_time.observe(now - choice.first_token_at)
        if end.completion_tokens > 1:
            metrics.time_per_output_token.observe((now - choice.first_token_at) / (end.completion_tokens - 1))

    def fail(self, choice: Choice, error: ApiError) -> None:
        if error.code == "queue_full":
            self.admission.add_retry_after(error)
        if choice.stream.is_pooled and len(choice.stream.choices) > 1 and error.status == 400:
            error = ApiError(400, error.code, f"text {choice.index}: {error.message}", error.param)
        self._stop_waiting(choice)
        choice.stream.fail(error)

    def release(self, stream: ResponseStream) -> None:
        """The handler is done with the stream. A second call does nothing."""
        for choice in stream.choices:
            self._stop_waiting(choice)
            # Else the two are a cycle; see `end`.
            choice.stream = NO_STREAM
        stream.fail(ClientDisconnected())

    def _start(self, choice: Choice, now: float) -> None:
        """The engine has computed the choice's prompt."""
        choice.waiting = False
        choice.first_token_at = choice.stream.last_token_at = choice.stream.last_progress_at = now
        self._enter_phase(choice.stream, "generating")
        self.admission.start(choice.prompt_tokens, choice.stream.tenant)

    def _enter_phase(self, stream: ResponseStream, phase: Phase) -> None:
        self._phases[stream.phase] -= 1
        self._phases[phase] += 1
        stream.phase = phase

    def _stop_waiting(self, choice: Choice) -> None:
        if choice.waiting:
            choice.waiting = False
            self.admission.leave_queue(choice.prompt_tokens, choice.stream.tenant)

    def update_engine(self, model: ServedModel | None, status: Status | None, now: float) -> None:
        """Take the state of the engine as a tokenizer worker reports it."""
        if model is not None and (self.model is None or self.model.epoch != model.epoch):
            self.model = model
        last = self.status
        if status is None or last is None or status.counters.steps != last.counters.steps or not status.running:
            self._stepped_at = now
        self.status = status

    def count_starts(self, replicas: Iterable[ReplicaView]) -> None:
        """Count each start of each replica once. A replica that is lost keeps its epoch."""
        for replica in replicas:
            name = replica.replica or replica.address
            if replica.epoch > self._epochs.get(name, (0, 0)):
                self._epochs[name] = replica.epoch
                self.metrics.engine_starts.value += 1

    def step_age(self, now: float) -> float:
        """Seconds that requests have been queued or running without a step; 0 when the engine has none, or is lost."""
        if self.status is None:
            return 0.0
        # A step that hangs when nothing ran before it sends no status with running requests.
        busy = self.status.running or self._phases["waiting"] or self._phases["generating"]
        return now - self._stepped_at if busy else 0.0

    def phases(self) -> dict[str, int]:
        """Return the number of HTTP requests in each phase."""
        reading = len(self.in_flight) - self._phases.total() - len(self.held)
        counts: dict[str, int] = {phase: self._phases[phase] for phase in PHASES}
        return counts | {"reading": reading, "held": len(self.held)}


def _estimate_prompt_tokens(request: Generate) -> int:
    """Estimate the tokens of a prompt that is not encoded yet: most text has four characters per token."""
    if request.tokens is not None:
        return len(request.tokens) // 4
    if request.messages is not None:
        tools = 0 if (offered := request.options.tools) is None else len(msgspec.json.encode(offered.definitions))
        characters = sum(len(message.content or "") + len(message.reasoning or "") for message in request.messages)
        return (characters + tools) // 4 + len(request.messages)
    second = 0 if request.pooling is None else len(request.pooling.second_text or "")
    return (len(request.prompt or "") + second) // 4 + 1
