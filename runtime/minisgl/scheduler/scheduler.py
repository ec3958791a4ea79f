"""Plans the next step: admission, preemption and the token budget. No I/O, no clock, no device."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.errors import CodedError, describe
from minisgl.scheduler.compiling import GrammarThreads
from minisgl.scheduler.constraints import (
    Constraint,
    ConstraintError,
    MatcherTokens,
    Vocabulary,
    advance_all,
    consume_tokens,
    fill_masks,
    open_first,
)
from minisgl.scheduler.logits_processors import encode_logits_processors
from minisgl.scheduler.logprobs import prompt_logprobs, row_logprobs
from minisgl.scheduler.pages import NO_PAGES
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.request import ERROR, STOP, Completed, LateRows, Phase, Request, RequestTable
from minisgl.scheduler.row_pages import RowPages
from minisgl.scheduler.shared_prefixes import SharedPrefixes
from minisgl.scheduler.shares import Shares, has_share
from minisgl.scheduler.step_output import DEADLINE_EXCEEDED_MESSAGE, Failure, RequestError, StepOutput
from minisgl.scheduler.step_times import StepTimes
from minisgl.scheduler.token_budget import CONTINUED_SHARE, LEAST_SHARE, TokenBudget
from minisgl.scheduler.validation import request_from_submit
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, Counters, PromptLogprobs, Submit
from minisgl.wire.plan import EMPTY, NO_ROWS, NO_UPDATES, IntArray, RowLogprobs, StepPlan, StepResult

if TYPE_CHECKING:
    from minisgl.grammar.grammars import Grammars

_NO_SEGMENTS = np.empty((0, 4), np.int32)

GROWTH_SHARE_START = 0.5
"""Optimistic admission: the share of the tokens that running requests may still generate for which a new request must
leave free pages."""
GROWTH_SHARE_MIN = 0.05
GROWTH_SHARE_DECAY = 0.998
GROWTH_SHARE_RAISE = 0.2
"""Added at a preemption, since the estimate was too low."""
GROWTH_TOKENS_MAX = 4096
"""Upper bound of the growth expected of one request: max_tokens is often just what the context leaves."""
BACKLOG_PATIENCE = 1.8
"""Longest time of a step, relative to its target, while many prompts wait: short steps compute prompts more slowly, and
every prompt that waits loses that time."""
BACKLOG_STEPS = 5
"""Number of steps of the target's time, filled with waiting prompt tokens, from which on steps take longer."""
COMPILE_PATIENCE = 0.002
"""Seconds that a request waits for its grammar before its prompt is computed without it. Grammars that are known take
less, and a prompt whose last token waits for its grammar takes one more step."""
AHEAD_TOKENS = 512
"""Least tokens of such a prompt: shorter ones are computed together with their last token, in about the same time."""
RETRY_STEPS = 64
"""Steps after which a queue head that did not fit is tried again even if no page was released."""
FIRST_PROMPT_TOKENS = 512
"""Longest prompt that is computed before the decode rows of another tenant, in about the time of a step of these."""
KEPT_ROWS = 2
"""Most rows that are kept free for further tenants: one for the next request, while that of the last one is in flight
once more."""
KEPT_ROWS_OF = 8
"""Rows for each that is kept."""


class _Launched(msgspec.Struct, frozen=True):
    step: int
    mask: IntArray
    """[rows] 1 for the rows of the step."""
    sampled: IntArray
    """[S] slots of the rows that sample."""
    late: IntArray
    """Those with a constraint."""


class Consuming(NamedTuple):
    """Tokens of a step that matchers have not consumed yet, for `Scheduler.consume`."""

    requests: Sequence[Request]
    matchers: MatcherTokens
    """With indices of `requests`."""


_NOTHING: Final = Consuming((), MatcherTokens([], []))


class Advanced(msgspec.Struct, frozen=True):
    """A step by whose result requests are advanced, for `Scheduler.output`."""

    done: Completed
    sampled: IntArray
    logprobs: RowLogprobs | None
    of_prompts: list[tuple[int, PromptLogprobs]]
    consuming: Consuming
    """Consumed already, unless the caller of `advance` does it."""


BeginMasks = Callable[[Mapping[int, Constraint]], None]
"""Takes constraints by late row."""


class Scheduler:
    """Decides which rows run in each step.

    Call `plan` and `advance`, with `output`, in turn, results in the order of their plans; with overlap requests are
    advanced by the result of a plan after the next plan is made.
    """

    def __init__(self, config: SchedulerConfig, epoch: int = 0, grammars: GrammarThreads | None = None) -> None:
        """`grammars`: None refuses requests with a grammar."""
        page = config.page_size
        if config.num_pages * page < config.max_model_len:
            raise ValueError(
                f"{config.num_pages} pages of {page} tokens cannot hold one request of max_model_len "
                f"{config.max_model_len}; lower max_model_len or give the pool more memory"
            )
        self.config = config
        self.epoch = epoch
        self.counters = Counters()
        self.now = 0.0
        """Seconds on a clock of the caller, who sets it before each call; times in the counters use it."""
        self.table = RequestTable(
            rows=config.max_running,
            max_length=config.max_model_len,
            max_pages=-(-config.max_model_len // page),
            vocab_size=config.vocab_size,
            eos_ids=config.eos_token_ids,
        )
        self.times = StepTimes()
        """Measured times of steps, which the step loop adds."""
        self.pages = RowPages(config, self.table, self.counters)
        self._shares = Shares(self.table.rows_of)
        self.queue = WaitingQueue(self._shares)
        self._grammars = grammars
        self._vocabulary = Vocabulary(config.vocab_size, config.eos_token_ids)
        self._compiling: dict[bytes, tuple[Request, Future[Constraint]]] = {}
        """Requests whose grammars are being compiled."""
        self._held: dict[bytes, Request] = {}
        """Those of them that are not queued yet."""
        self._long: deque[Request] = deque()
        """Requests that were held with long prompts, by arrival; they are queued when COMPILE_PATIENCE has passed."""
        self._notices = StepOutput.without_tokens([], [])
        """Failures and acceptances that clients are not told yet."""
        self._unfinished: dict[bytes, Request] = {}
        self._deadlines: list[tuple[float, int, bytes]] = []
        self._joining: dict[int, Request] = {}
        """Admitted requests by row, of which no plan has told the engine yet: all that a prompt may compute before its
        grammar is compiled can be cached."""
        self._failed_rows: set[int] = set()
        """Rows whose logits were not finite, until they are released."""
        self._constraint_errors: dict[int, ConstraintError] = {}
        """Why rows ended with an error that is not due to their logits."""
        self._launched: deque[_Launched] = deque()
        self._shared_prefixes = SharedPrefixes(page)
        self._ordered_key: bytes | None = None
        self._ordered: IntArray = NO_PAGES
        self._arrivals = 0
        self._step = 0
        self._growth_share = GROWTH_SHARE_START
        self._blocked_head: Request | None = None
        """Head of the queue that did not fit; tried again when pages were released."""
        self._hopeless_head: Request | None = None
        """The same, if it would not fit either with all pages that other tenants could give up."""
        self._kept_rows = min(KEPT_ROWS, config.max_running // KEPT_ROWS_OF)
        self._is_first_prompt = False
        """The newest plan is one of `_plan_first_prompt`."""

    @property
    def has_work(self) -> bool:
        """True while a request has not ended or a launched step is not completed."""
        return bool(self.table.num_in_use or len(self.queue) or self._launched or self._compiling)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.queue) + len(self._held)

    @property
    def num_held(self) -> int:
        """Those of them that wait only until their grammars are compiled."""
        return len(self._held)

    @property
    def num_late_rows(self) -> int:
        """Rows of the newest launched step that need masks."""
        return len(self._launched[-1].late)

    @property
    def may_wait(self) -> bool:
        """True while a request that arrives could join the next step, and no prompt waits for that step."""
        table, head = self.table, self.queue.peek()
        # The next plan releases settled rows.
        rows = table.num_free_rows + len(table.settled())
        return rows > 0 and not table.in_prefill and (head is None or self._keeps_row_from(head, rows))

    def submit(self, message: Submit, client: int = 0) -> bool:
        """Accept a request, whose deadline is `remaining_ms` from now. One with output goes ahead of new ones, even
        into a full queue, because its client sees a pause. False: its grammar is being compiled; `StepOutput` reports
        the end of that. True: it waits for nothing but a row. Raises RequestError."""
        if message.id in self._unfinished:
            raise RequestError("duplicate_request", "a request with this id is already running")
        if self._is_full(message.tenant) and not message.output:
            raise RequestError("queue_full", f"{self.num_waiting} requests are already waiting; retry later")
        request = request_from_submit(message, client=client, arrival=self._arrivals, now=self.now, config=self.config)
        self._arrivals += 1
        if request.tenant not in self.table.rows_of and request.tenant not in self.queue.tenants:
            self._shares.join(request.tenant, (*self.table.rows_of, *self.queue.tenants), self.now)
        if message.constraint.grammar:
            if self._grammars is None:
                raise RequestError("grammar_unavailable", "this engine has no tokenizer files for grammars")
            request.constraint = self._grammars.ready(message, self._vocabulary)
            request.awaits_grammar = request.constraint is None
        elif message.is_constrained:
            request.constraint = Constraint(message, self._vocabulary, None)
            request.constraint.replay(request.tokens[request.prompt_length :].tolist())
        if request.awaits_grammar:
            assert self._grammars is not None
            self._compiling[request.id] = request, self._grammars.start(request, message, self._vocabulary)
            self._held[request.id] = request
            # Log-probabilities of a prompt would be output of a request that may still be refused.
            if len(request.tokens) >= AHEAD_TOKENS and request.prompt_logprobs_from == request.prompt_length:
                self._long.append(request)
        else:
            self.queue.push(request)
        self._unfinished[request.id] = request
        if request.deadline is not None:
            # Not the request itself, whose matcher would keep its grammar's instance in use after the answer.
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request.id))
            if len(self._deadlines) > 2 * len(self._unfinished) + 64:
                self._deadlines = [entry for entry in self._deadlines if self._awaited(*entry[1:])]
                heapq.heapify(self._deadlines)
        return not request.awaits_grammar

    def _is_full(self, tenant: bytes) -> bool:
        """Whether the queue has no place for another request of a tenant."""
        most, waiting = self.config.max_waiting, self.num_waiting
        if waiting < most:
            return False
        held = [request.tenant for request in self._held.values()]
        own = self.queue.num_of(tenant) + held.count(tenant)
        return not has_share(own, 1, waiting, most, {*self.queue.tenants, *held})

    def abort(self, request_id: bytes) -> bool:
        """End a request without an answer. False when the id is unknown or the request has ended."""
        request = self._unfinished.pop(request_id, None)
        if request is None:
            return False
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            # The threads are for requests that somebody waits for.
            compiling[1].cancel()
        if request.slot is not None:
            self.table.end(request.slot)
        elif self._held.pop(request_id, None) is None:
            self.queue.remove(request_id)
        return True

    def drop_client(self, client: int) -> None:
        """Abort all requests of a client that disconnected."""
        for request in list(self._unfinished.values()):
            if request.client == client:
                self.abort(request.id)

    def abort_all(self) -> int:
        """Abort all requests. Returns their number."""
        requests = list(self._unfinished)
        for request_id in requests:
            self.abort(request_id)
        return len(requests)

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request has locked. Returns the number of pages freed."""
        self._blocked_head = self._hopeless_head = None
        return self.pages.flush()

    def expire(self) -> list[Failure]:
        """End the requests whose deadline has passed."""
        failures = []
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            if (request := self._awaited(arrival, request_id)) is not None:
                self.abort(request_id)
                failures.append(Failure(request.client, request_id, "deadline_exceeded", DEADLINE_EXCEEDED_MESSAGE))
        return failures

    def _awaited(self, arrival: int, request_id: bytes) -> Request | None:
        """The request with this number, unless it has ended: then another one may have its id."""
        request = self._unfinished.get(request_id)
        return request if request is not None and request.arrival == arrival else None

    def plan(self) -> StepPlan | None:
        """Plan the next step. None when no row can run before a launched step is completed or a request arrives."""
        for slot in self.table.settled():
            self._release(slot)
        if self._grammars is not None and self._grammars.finished:
            self._take_compiled(self._grammars)
        self._queue_long_prompts()
        is_shared = self._is_shared
        if is_shared:
            self._shares.charge_rows()
            self._make_room()
        if self._step % RETRY_STEPS == 0:
            self._blocked_head = self._hopeless_head = None
        updates: list[IntArray] = []
        decode, positions = NO_PAGES, NO_PAGES
        segments, joined = self._plan_first_prompt() if is_shared else ([], [])
        if not joined:
            decode, positions = self._plan_decode(updates)
            segments, joined = self._plan_prefill(decode, positions)
        for request in joined:
            assert request.slot is not None
            self._joining[request.slot] = request
        if not len(decode) and not segments:
            return None
        admitted = list(self._joining.values())
        self._joining.clear()

        slots, prefill, prefill_tokens, new_rows, processors = decode, _NO_SEGMENTS, EMPTY, NO_ROWS, EMPTY
        if segments:
            prefill = np.array(segments, np.int32)
            slots = np.concatenate((decode, prefill[:, 0]))
            prefill_tokens = np.concatenate(
                [self.table.tokens[slot, start : start + length] for slot, start, length, _ in segments]
            )
        if admitted:
            updates += map(self._all_pages, admitted)
            new_rows = np.stack([_sampling_row(request) for request in admitted], axis=1)
            processors = np.concatenate([encode_logits_processors(request, self.config) for request in admitted])
        plan = StepPlan.build(
            epoch=self.epoch,
            step=self._step,
            decode_slots=decode,
            decode_positions=positions,
            prefill_slots=prefill[:, 0],
            prefill_starts=prefill[:, 1],
            prefill_lengths=prefill[:, 2],
            prefill_sample=prefill[:, 3],
            prefill_tokens=prefill_tokens,
            page_updates=_concatenated(updates),
            new_rows=new_rows,
            poison_pages=self.pages.pool.take_freed(),
            logits_processors=processors,
            shared_prefixes=self._shared_prefixes.for_step(self.table.page_table, decode, positions),
        )
        sampled = plan.sampled_slots
        self._launched.append(_Launched(self._step, self.table.launch(slots), sampled, self.table.late_among(sampled)))
        self._step += 1
        self.counters.steps += 1
        self.counters.mixed_steps += bool(len(decode) and segments)
        self.counters.prefill_tokens += len(plan.prefill_tokens)
        size = len(sampled) + len(plan.prefill_tokens)
        self.counters.step_sizes[bisect_left(STEP_TOKENS_EDGES, size)] += 1
        self.counters.step_tokens += size
        self._growth_share = max(self._growth_share * GROWTH_SHARE_DECAY, GROWTH_SHARE_MIN)
        return plan

    def advance(self, result: StepResult, begin_masks: BeginMasks | None = None, *, consume: bool = True) -> Advanced:
        """Advance requests by the result of the oldest launched step; `output` follows. `begin_masks` is called with
        the open rows of the newest launched step, if any, before the tokens of the others are consumed. `consume`:
        False leaves these others to `consume`, before masks are filled and before the next step is advanced."""
        launched = self._launched.popleft()
        assert result.step == launched.step, "results are out of order"
        table = self.table
        of_prompts = list(prompt_logprobs(table, result.prompt_logprobs)) if result.prompt_logprobs else []
        done = table.collect(launched.mask, launched.sampled, result.tokens)
        self.counters.generated_tokens += len(done.slots)
        consuming = _NOTHING
        if len(launched.late):
            consuming = self._advance_constraints(done, begin_masks)
            if consume:
                self._fail_refused(done, consuming)
        return Advanced(done, launched.sampled, result.logprobs, of_prompts, consuming)

    def output(self, advanced: Advanced) -> StepOutput:
        """Messages for clients about a step."""
        table, done = self.table, advanced.done
        failures: list[Failure] = []
        if np.count_nonzero(done.finish):
            failures = self._forget_ended(done)
            if failures:
                done = done[done.finish != ERROR]
        accepted: list[tuple[int, bytes]] = []
        if (notices := self.take_notices()) is not None:
            failures, accepted = [*notices.failures, *failures], notices.accepted
        slots = done.slots
        scored, first = advanced.logprobs, np.count_nonzero(done.index) < len(slots)
        return StepOutput(
            table.ids.take(slots),
            table.client.take(slots),
            done.index,
            done.tokens,
            done.finish,
            table.cached.take(slots),
            failures,
            {} if scored is None else row_logprobs(table, scored, advanced.sampled, slots),
            advanced.of_prompts,
            self._started(done) if first else {},
            table.take_resumed(slots),
            accepted,
        )

    def _forget_ended(self, done: Completed) -> list[Failure]:
        """Forget the requests that ended with this step. Returns the failures of those without a token."""
        failures = []
        ended = np.flatnonzero(done.finish)
        for slot, finish in zip(done.slots[ended].tolist(), done.finish[ended].tolist(), strict=True):
            request = self.table.request(slot)
            del self._unfinished[request.id]
            self.counters.finished += 1
            if finish != ERROR:
                continue
            if (error := self._constraint_errors.pop(slot, None)) is not None:
                failures.append(Failure(request.client, request.id, error.code, error.message))
                continue
            self._failed_rows.add(slot)
            message = "the model's logits are not finite; the weights or the KV cache are damaged"
            failures.append(Failure(request.client, request.id, "engine_error", message))
        return failures

    def _advance_constraints(self, done: Completed, begin_masks: BeginMasks | None) -> Consuming:
        """Advance the constraints of late rows by their new tokens, which may end them: `done.finish` is updated.
        Matchers have consumed the tokens of open rows only."""
        table = self.table
        rows = np.flatnonzero(table.late.take(done.slots) & (done.finish == 0))
        slots = done.slots[rows]
        requests, late_constraints = table.late_rows(slots)
        constraints = [constraint for constraint in late_constraints if constraint is not None]
        tokens = list(zip(constraints, done.tokens[rows].tolist(), strict=True))
        if begin_masks is None or not (first := open_first(constraints)):
            return self._advance_rows(done, requests, tokens)
        chosen = [requests[index] for index in first]
        self._fail_refused(done, self._advance_rows(done, chosen, [tokens[index] for index in first]))
        late = {slot: row for row, slot in enumerate(self._launched[-1].late.tolist())}
        going = {index: slot for index in first if not done.finish[rows[index]] and (slot := int(slots[index])) in late}
        if going:
            begin_masks({late[slot]: constraints[index] for index, slot in going.items()})
        others = sorted(set(range(len(tokens))).difference(first))
        return self._advance_rows(done, [requests[index] for index in others], [tokens[index] for index in others])

    def _advance_rows(
        self, done: Completed, requests: Sequence[Request], tokens: Sequence[tuple[Constraint, int]]
    ) -> Consuming:
        """`_advance_constraints` for some requests with their constraints and tokens."""
        ended, matchers = advance_all(tokens)
        for index in ended:
            self._finish(done, requests[index], STOP)
        return Consuming(requests, matchers)

    def _fail_refused(self, done: Completed, consuming: Consuming) -> None:
        """Let matchers consume tokens of a step. Requests end whose matchers refuse them."""
        for request, error in self.consume(consuming):
            self._constraint_errors[self._finish(done, request, ERROR)] = error

    def _finish(self, done: Completed, request: Request, reason: int) -> int:
        """End a request with its token in `done`. Returns its slot."""
        slot = request.slot
        assert slot is not None
        self.table.end(slot)
        done.finish[done.slots == slot] = reason
        return slot

    def consume(self, consuming: Consuming) -> list[tuple[Request, ConstraintError]]:
        """Let matchers consume the tokens that `advance` left, on any thread. Returns the requests whose matchers
        refuse them, for `fail`."""
        errors = consume_tokens(consuming.matchers, self._ready_grammars)
        return [(consuming.requests[index], error) for index, error in errors.items()]

    def late_rows(self) -> LateRows:
        """Late rows of the newest launched step, once requests are advanced by the results of all earlier ones."""
        return self.table.late_rows(self._launched[-1].late)

    def fill_masks(
        self, rows: Mapping[int, Constraint | None], masks: IntArray, *, slow: bool = False
    ) -> dict[int, ConstraintError]:
        """Write the masks of some late rows into `masks` [L, words] of all; rows that have ended may sample any token.
        Returns errors by row. Other threads may call it until requests are advanced by the step of these rows."""
        return fill_masks(rows, masks, self._vocabulary, self._ready_grammars, slow=slow)

    def fail(self, errors: Iterable[tuple[Request, ConstraintError]]) -> None:
        """End the requests that cannot continue, unless they have ended. Call it before requests are advanced by the
        step whose masks they need."""
        for request, error in errors:
            if self._unfinished.get(request.id) is request:
                self.abort(request.id)
                self.counters.finished += 1
                self._notices.failures.append(Failure(request.client, request.id, error.code, error.message))

    @property
    def _ready_grammars(self) -> Grammars | None:
        return None if self._grammars is None else self._grammars.grammars

    def take_notices(self) -> StepOutput | None:
        """Failures and acceptances since the last output of a step; None: there are none."""
        notices = self._notices
        if not (notices.failures or notices.accepted):
            return None
        self._notices = StepOutput.without_tokens([], [])
        return notices

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait until a grammar is compiled, up to this time; only if requests wait for that."""
        if self._compiling and self._grammars is not None:
            self._grammars.wait(seconds)

    def _take_compiled(self, grammars: GrammarThreads) -> None:
        """Let requests continue whose grammars are compiled; others fail."""
        while grammars.finished:
            request, compiled = grammars.finished.popleft()
            expected = self._compiling.get(request.id)
            if expected is None or expected[1] is not compiled:
                # It was aborted.
                continue
            del self._compiling[request.id]
            if (error := compiled.exception()) is None:
                request.constraint = compiled.result()
                request.awaits_grammar = False
                if self._held.pop(request.id, None) is not None:
                    self.queue.push(request)
                self._notices.accepted.append((request.client, request.id))
                continue
            self.abort(request.id)
            code = error.code if isinstance(error, CodedError) else "grammar_failed"
            self._notices.failures.append(Failure(request.client, request.id, code, describe(error)))

    def _queue_long_prompts(self) -> None:
        """Queue requests whose prompts are computed while their grammars are compiled."""
        while self._long and self.now - self._long[0].queued_at >= COMPILE_PATIENCE:
            request = self._long.popleft()
            # Otherwise it has ended, or its grammar is compiled.
            if self._held.get(request.id) is request:
                self.queue.push(self._held.pop(request.id))

    def _started(self, done: Completed) -> dict[int, tuple[float, float]]:
        """`StepOutput.started` of the rows with first tokens."""
        requests = {row: self.table.request(done.slots[row]) for row in np.flatnonzero(done.index == 0).tolist()}
        return {row: (r.admitted_at - r.queued_at, r.admitted_at) for row, r in requests.items()}

    def _plan_decode(self, updates: list[IntArray]) -> tuple[IntArray, IntArray]:
        """Rows that decode in this step and the positions of their input tokens. Rows that need a page receive one; the
        changes of page tables are appended to `updates`."""
        table = self.table
        slots = self._shortest_first(table.decodable())
        positions = table.computed.take(slots)
        needs_page = positions >= table.num_pages.take(slots) * self.config.page_size
        count = int(np.count_nonzero(needs_page))
        if count:
            if count > self.pages.available:
                slots = self._preempt_for_pages(slots, needs_page)
                # Some rows pause while others grow, which changes the order by length.
                self._ordered_key = None
                positions = table.computed[slots]
                needs_page = positions >= table.num_pages[slots] * self.config.page_size
            growing = slots[needs_page]
            index = table.num_pages[growing]
            pages = self.pages.allocate(len(growing))
            table.page_table[growing, index] = pages
            table.num_pages[growing] += 1
            updates.append(np.array((growing, index, pages)))
        table.launch_decode(slots, positions)
        return slots, positions

    def _shortest_first(self, rows: IntArray) -> IntArray:
        """`rows` by length, shortest first. Attention processes rows in this order, so that rows of similar length end
        together: worth 2 to 7 % of its time where lengths differ much."""
        key = rows.tobytes()
        if key != self._ordered_key:
            self._ordered_key = key
            self._ordered = rows[self.table.computed.take(rows).argsort(kind="stable")]
        # Otherwise each row has grown by one token since: a slot given to another request skips at least one plan.
        return self._ordered

    def _plan_prefill(
        self, decode: IntArray, positions: IntArray
    ) -> tuple[list[tuple[int, int, int, int]], list[Request]]:
        """Segments (slot, start, length, sample) of prompts beside the decode rows, within the token budget: first of
        prompts in progress, then of requests that are admitted; and these requests."""
        segments: list[tuple[int, int, int, int]] = []
        admitted: list[Request] = []
        in_progress = self.table.prefilling()
        if not in_progress and not len(self.queue):
            return segments, admitted
        budget = self._token_budget(decode, positions)
        if self._is_shared:
            in_progress.sort(key=self._shares.key)
        for request in in_progress:
            while not budget.is_spent and self._is_before(request) and (new := self._admit()) is not None:
                admitted.append(new)
                self._schedule_segment(new, budget, segments)
            if budget.is_spent:
                break
            self._schedule_segment(request, budget, segments)
        while not budget.is_spent and (new := self._admit()) is not None:
            admitted.append(new)
            self._schedule_segment(new, budget, segments)
        return segments, admitted

    def _plan_first_prompt(self) -> tuple[list[tuple[int, int, int, int]], list[Request]]:
        """`_plan_prefill` of a step without decode rows, for a short prompt of a tenant with few rows while another one
        has most of them: its first token comes as soon as alone, and the other one's a little later. Nothing in every
        second step, nor where this does not hold."""
        head, rows_of = self.queue.peek(), self.table.rows_of
        most = max(rows_of.values(), default=0)
        self._is_first_prompt = (
            not self._is_first_prompt
            and head is not None
            and 4 * rows_of[head.tenant] < most
            and 2 * most > self.config.max_running
            and len(head.tokens) <= min(FIRST_PROMPT_TOKENS, self.config.max_step_tokens)
            and not head.awaits_grammar
            and self._admit() is not None
        )
        segments: list[tuple[int, int, int, int]] = []
        if not self._is_first_prompt:
            return segments, []
        assert head is not None
        self._schedule_segment(head, TokenBudget(self.config.max_step_tokens), segments)
        # A slot in the next step may be another request's.
        self._ordered_key = None
        return segments, [head]

    @property
    def _is_shared(self) -> bool:
        """True while more than one tenant has requests."""
        rows_of, waiting = self.table.rows_of, self.queue.tenants
        return len(rows_of) > 1 or len(waiting) > 1 or bool(rows_of and waiting and rows_of.keys() != waiting)

    def _is_before(self, request: Request) -> bool:
        """Whether the head of the queue comes before a prompt in progress of another tenant."""
        head = self.queue.peek()
        if head is None or head.tenant == request.tenant:
            return False
        return self._shares.key(head) < self._shares.key(request)

    def _make_room(self) -> None:
        """Preempt a row for the head of the queue if its tenant has fewer than another one, unless enough rows will be
        free one step later."""
        table, head = self.table, self.queue.peek()
        if head is None or head is self._hopeless_head or (table.has_free_row and head is not self._blocked_head):
            return
        if self._shares.has_most(head.tenant) or len(table.unsettled) >= max(self._kept_rows, 1):
            return
        rows_of, phase = table.rows_of, table.phase
        own = rows_of[head.tenant]
        yielding = [
            request
            for slot, request in enumerate(table.requests)
            if request is not None
            and rows_of[request.tenant] > own + 1
            and request.priority <= head.priority
            and not request.continues
            and phase[slot] in (Phase.PREFILL, Phase.DECODE)
        ]
        if not yielding:
            return
        if head is self._blocked_head and not self._fits_without(head, yielding):
            self._hopeless_head = head
            return
        victim = max(yielding, key=lambda request: (rows_of[request.tenant], request.priority_key)).slot
        assert victim is not None
        self._preempt(victim)

    def _fits_without(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether there are pages for a prompt when these rows are released."""
        prefix, cached = self.pages.lock_prefix(request)
        needed = self._missing_pages(request, cached)
        slots = [*self.table.unsettled, *(other.slot for other in others if other.slot is not None)]
        released = sum(self.pages.reclaimable(slot) for slot in slots)
        fits = needed <= self.pages.available + released
        self.pages.unlock(prefix)
        return fits

    def _missing_pages(self, request: Request, cached: IntArray) -> int:
        """Number of pages that a prompt needs besides cached ones."""
        return -(-len(request.tokens) // self.config.page_size) - len(cached)

    def _preempt(self, slot: int) -> None:
        self.table.preempt(slot)
        self.counters.preemptions += 1
        if self.table.in_flight[slot] == 0:
            self._release(slot)

    def _token_budget(self, decode: IntArray, positions: IntArray) -> TokenBudget:
        """Budget of a step's prompts. The step is kept short when a client waits for the next token of a decode row;
        it may take longer the more prompts wait for each of these, and the longer all of them will take."""
        config = self.config
        budget = TokenBudget(max(config.max_step_tokens - len(decode), 1), len(decode), config.step_graphs)
        if config.target_itl_ms and np.count_nonzero(self.table.streams.take(decode)):
            context = int(positions.sum(dtype=np.int64))
            waiting = len(self.queue) + len(self.table.in_prefill) - 1
            target = config.target_itl_ms / 1000
            patience = max(1 + waiting / len(decode), self._waiting_seconds() / (BACKLOG_STEPS * target))
            share = CONTINUED_SHARE if self._continued_waits() else LEAST_SHARE
            budget.limit_seconds(min(patience, BACKLOG_PATIENCE) * target, self.times, context, share)
        return budget

    def _continued_waits(self) -> bool:
        """Whether a prompt with the tokens of an engine that was lost is to be computed in the next step: these go
        first."""
        prompts = (*self.table.prefilling()[:1], self.queue.peek())
        return any(request is not None and request.continues for request in prompts)

    def _waiting_seconds(self) -> float:
        """Expected time of the matrix products of all waiting prompts; 0 before any was measured."""
        if self.times.costs is None:
            return 0.0
        slots = [slot for request in self.table.prefilling() if (slot := request.slot) is not None]
        in_progress = int((self.table.prefill_end[slots] - self.table.computed[slots]).sum()) if slots else 0
        return self.times.costs.token * (in_progress + self.queue.tokens)

    def _all_pages(self, request: Request) -> IntArray:
        """`StepPlan.page_updates` of a row that joins."""
        assert request.slot is not None
        pages = self.table.pages(request.slot)
        return np.stack((np.full(len(pages), request.slot, np.int32), np.arange(len(pages), dtype=np.int32), pages))

    def _schedule_segment(
        self, request: Request, budget: TokenBudget, segments: list[tuple[int, int, int, int]]
    ) -> None:
        """Add the next segment of a prompt, if the budget has tokens for it."""
        table, slot = self.table, request.slot
        assert slot is not None
        start = int(table.computed[slot])
        # The step of the last token samples the next one, for which the grammar is needed.
        wanted = int(table.prefill_end[slot]) - start - request.awaits_grammar
        length = budget.grant(start, wanted) if wanted else 0
        if not length:
            return
        if self._is_shared:
            self._shares.charge(request.tenant, length)
        sample = table.launch_prefill(slot, length)
        segments.append((slot, start, length, int(sample)))
        # Cached immediately: steps run in order, and within a step all KV is stored before any is read. A request that
        # matches these pages from now on, even in this plan, reads them after they are written.
        self.pages.share(slot)

    def _admit(self) -> Request | None:
        """Give the head of the queue a row and the pages of its prompt, if they are available."""
        request = self.queue.peek()
        if request is None or not self.table.has_free_row or request is self._blocked_head:
            return None
        if self._keeps_row_from(request, self.table.num_free_rows):
            return None
        prefix, cached = self.pages.lock_prefix(request)
        needed = self._missing_pages(request, cached)
        if self.table.num_in_use and needed + self._expected_growth(request) > self.pages.available:
            self.pages.unlock(prefix)
            self._blocked_head = request
            return None
        self.queue.pop()
        first_time = request.cached is None
        slot = self.table.admit(request, cached, self.pages.allocate(needed), self.config.page_size)
        self.pages.attach(slot, prefix)
        if first_time:
            assert request.cached is not None
            self.counters.prompt_tokens += request.prompt_length
            self.counters.cached_tokens += request.cached
            request.admitted_at = self.now
            waited = self.now - request.queued_at
            self.counters.queue_times[bisect_left(QUEUE_TIME_EDGES, waited)] += 1
            self.counters.queue_seconds += waited
        return request

    def _keeps_row_from(self, request: Request, free_rows: int) -> bool:
        """Whether the last free rows are kept for tenants with fewer rows, since several have been here. It takes two
        steps to take a row from another one."""
        return (
            free_rows <= self._kept_rows
            and self._shares.expects_others(self.now)
            and self._shares.has_most(request.tenant)
        )

    def _expected_growth(self, new: Request) -> int:
        """Pages that must stay free for the tokens that running requests and the new one will probably generate."""
        table = self.table
        running = (table.phase == Phase.PREFILL) | (table.phase == Phase.DECODE)
        left = np.append(table.limit[running] - table.length[running], new.limit - len(new.tokens))
        tokens = np.minimum(left, GROWTH_TOKENS_MAX) * self._growth_share
        return int((tokens / self.config.page_size).sum())

    def _preempt_for_pages(self, slots: IntArray, needs_page: NDArray[np.bool_]) -> IntArray:
        """Preempt the requests of lowest priority when rows that need a page outnumber the available pages.

        Returns the rows that decode in this step. A preempted row that is in flight frees its pages one step later;
        until then rows without a page pause.
        """
        table = self.table
        running = [request for request in table.requests if request is not None and request.slot is not None]
        running = [r for r in running if table.phase[r.slot] in (Phase.PREFILL, Phase.DECODE)]
        running.sort(key=lambda request: request.priority_key)
        growing = set(slots[needs_page].tolist())
        coming = sum(self.pages.reclaimable(slot) for slot in table.unsettled)
        preempted: set[int] = set()
        while len(growing) > self.pages.available + coming and len(running) > 1:
            victim = running.pop().slot
            assert victim is not None
            self._preempt(victim)
            growing.discard(victim)
            preempted.add(victim)
            if table.in_flight[victim]:
                coming += self.pages.reclaimable(victim)
        if preempted:
            self._growth_share = min(self._growth_share + GROWTH_SHARE_RAISE, 1.0)
        granted = [r.slot for r in running if r.slot in growing][: self.pages.available]
        paused = growing.difference(granted)
        stays = [slot for slot in slots.tolist() if slot not in preempted and slot not in paused]
        return np.array(stays, np.int32)

    def _release(self, slot: int) -> None:
        """Free a settled row; a preempted request goes back to the queue."""
        preempting = self.table.phase[slot] == Phase.PREEMPTING
        self.pages.release(slot, damaged=slot in self._failed_rows)
        self._failed_rows.discard(slot)
        self._joining.pop(slot, None)
        request = self.table.release(slot)
        if preempting:
            self.queue.push(request)
        self._blocked_head = self._hopeless_head = None


def _concatenated(updates: list[IntArray]) -> IntArray:
    """`StepPlan.page_updates` from parts [3, U]; most steps have only the part of the decode rows."""
    match updates:
        case []:
            return NO_UPDATES
        case [only]:
            return only
    return np.concatenate(updates, axis=1)


def _sampling_row(request: Request) -> IntArray:
    """One column of `StepPlan.new_rows`."""
    params = request.params
    floats = np.array((params.temperature, params.top_p, params.min_p), np.float32).view(np.int32)
    seed = np.array((params.seed,), np.int64).view(np.int32)
    return np.array((request.slot, floats[0], params.top_k, floats[1], floats[2], seed[0], seed[1]), np.int32)
