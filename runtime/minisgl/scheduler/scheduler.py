"""Plans the next step: decode rows, and prompts within the token budget. No I/O, no clock, no device."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.engine.interface import MOST_PROMPTS
from minisgl.errors import CodedError
from minisgl.scheduler.admission import Admission
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.constrained import NOTHING_TO_CONSUME, BeginRows, Compiled, ConstrainedRequests, Consuming
from minisgl.scheduler.deadlines import Deadlines
from minisgl.scheduler.drafts import Drafts, with_drafts
from minisgl.scheduler.logits_processors import encode_logits_processors
from minisgl.scheduler.logprobs import prompt_logprobs, row_logprobs
from minisgl.scheduler.pages import NO_PAGES
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.request import ERROR, Completed, DraftRows, Request, RequestTable
from minisgl.scheduler.row_pages import RowPages
from minisgl.scheduler.shared_prefixes import SharedPrefixes
from minisgl.scheduler.shares import Shares, has_share
from minisgl.scheduler.step_output import DEADLINE_EXCEEDED_MESSAGE, Failure, RequestError, StepOutput
from minisgl.scheduler.step_times import StepTimes
from minisgl.scheduler.token_budget import CONTINUED_SHARE, LEAST_SHARE, TokenBudget
from minisgl.scheduler.validation import request_from
from minisgl.wire.messages import STEP_TOKENS_EDGES, Counters, Pool, PromptLogprobs, Submit
from minisgl.wire.plan import EMPTY, NO_ROWS, NO_UPDATES, FloatArray, IntArray, RowLogprobs, StepPlan, StepResult, runs

Segment = tuple[int, int, int, int]
"""Tokens of a prompt in a step: slot, start, length, and 1 if the step samples the next token."""

_NO_SEGMENTS: Final = np.empty((0, 4), np.int32)
_NO_ERRORS: Final[Mapping[int, CodedError]] = {}

BACKLOG_PATIENCE = 1.8
"""Longest time of a step, relative to its target, while many prompts wait: short steps compute prompts more slowly, and
every prompt that waits loses that time."""
BACKLOG_STEPS = 5
"""Number of steps of the target's time, filled with waiting prompt tokens, from which on steps take longer."""
RETRY_STEPS = 64
"""Steps after which a queue head that did not fit is tried again even if no page was released."""
FIRST_PROMPT_TOKENS = 512
"""Longest prompt that is computed before the decode rows of another tenant, in about the time of a step of these."""
MOST_JOINING = 16
"""Requests that get a row in one plan while several tenants are here: fifty take as long as a step, for which the first
token of another one waits."""


class _Launched(msgspec.Struct, frozen=True):
    step: int
    rows: IntArray
    """[rows] 1 for the rows of the step."""
    sampled: IntArray
    """[S] slots of the rows that sample."""
    num_decode: int
    """Number of rows that decode, the first of them."""
    drafts: DraftRows | None
    """Rows that sample; None: none of them has drafts."""
    constrained: IntArray
    """Those with a constraint."""
    slots: IntArray
    """[R] slots of the rows."""
    ends: IntArray | None
    """[R] their tokens that are computed behind the step; None: no layer has a window."""


class Advanced(msgspec.Struct, frozen=True):
    """A step by whose result requests are advanced, for `Scheduler.output`."""

    done: Completed
    logprobs: RowLogprobs | None
    of_prompts: list[tuple[int, PromptLogprobs]]
    consuming: Consuming
    """Left to the caller of `advance`."""
    errors: Mapping[int, CodedError]
    """Why requests ended with an error that is not due to their logits, by slot."""
    pooled: FloatArray | None
    """[S, size] outputs of a model that does not generate."""


class Scheduler:
    """Decides which rows run in each step.

    Call `plan` and `advance`, with `output`, in turn, results in the order of their plans; with overlap requests are
    advanced by the result of a plan after the next plan is made.
    """

    def __init__(self, config: SchedulerConfig, epoch: int = 0, compiler: ConstraintCompiler | None = None) -> None:
        """`compiler`: see ConstrainedRequests."""
        self.config = config
        self.epoch = epoch
        self.counters = Counters()
        self.now = 0.0
        """Seconds on a clock of the caller, who sets it before each call; times in the counters use it."""
        self.table = RequestTable(
            rows=config.max_running,
            # A pooled output takes the place of the token behind a text of any length.
            max_length=config.max_model_len + (config.pooling is not None),
            max_pages=-(-config.max_model_len // config.page_size),
            vocab_size=config.vocab_size,
            eos_ids=config.eos_token_ids,
        )
        self.times = StepTimes()
        """Measured times of steps, which the step loop adds."""
        self.pages = RowPages(config, self.table, self.counters)
        self._shares = Shares(self.table.rows_of)
        self.queue = WaitingQueue(self._shares)
        self.admission = Admission(config, self.table, self.pages, self.queue, self._shares, self.counters)
        self.constrained = ConstrainedRequests(config, self.table, compiler)
        self.drafts = Drafts(config, self.table, self.times, self.counters)
        self._notices = StepOutput.without_tokens([], [])
        """Failures and acceptances that clients are not told yet."""
        self._unfinished: dict[bytes, Request] = {}
        self._deadlines = Deadlines(self._unfinished)
        self._launched: deque[_Launched] = deque()
        self._shared_prefixes = SharedPrefixes(config.page_size)
        self._ordered_key: bytes | None = None
        self._ordered: IntArray = NO_PAGES
        self._arrivals = 0
        self._step = 0
        self._is_whole = config.pooling is not None and config.pooling.whole_texts
        self._may_join = 0
        """Requests that may still get a row in the plan that is made."""
        self._is_first_prompt = False
        """The newest plan is one of `_plan_first_prompt`."""

    @property
    def has_work(self) -> bool:
        """True while a request has not ended or a launched step is not completed."""
        return bool(self.table.num_in_use or len(self.queue) or self._launched or self.constrained.is_compiling)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.queue) + self.num_held

    @property
    def num_held(self) -> int:
        """Those of them that wait only for their constraints."""
        return len(self.constrained.held)

    @property
    def expects_others(self) -> bool:
        """Whether several tenants have rows, or one came beside others not long ago. No matter for texts that are
        pooled, of which a step takes hundreds."""
        return self.config.pooling is None and self._shares.expects_others(self.now)

    @property
    def may_wait(self) -> bool:
        """True while a request that arrives could join the next step, and no prompt waits for that step, or only texts
        that do not fill it."""
        table, head = self.table, self.queue.peek()
        # The next plan releases settled rows.
        rows = table.num_free_rows + len(table.settled())
        if self.config.pooling is not None:
            is_full = self.queue.tokens >= self.config.max_step_tokens or len(self.queue) >= rows
            return not is_full and not table.in_prefill
        return (
            rows > 0 and not table.in_prefill and (head is None or self.admission.keeps_row_from(head, rows, self.now))
        )

    def submit(self, message: Submit | Pool, client: int = 0) -> bool:
        """Accept a request, whose deadline is `remaining_ms` from now. One with output goes ahead of new ones, even
        into a full queue, because its client sees a pause. False: its constraint is being compiled; `StepOutput`
        reports the end of that. True: it waits for nothing but a row. Raises RequestError."""
        if message.id in self._unfinished:
            raise RequestError("duplicate_request", "a request with this id is already running")
        if self._is_full(message.tenant) and not message.output:
            raise RequestError("queue_full", f"{self.num_waiting} requests are already waiting; retry later")
        request = request_from(message, client=client, arrival=self._arrivals, now=self.now, config=self.config)
        self._arrivals += 1
        if request.tenant not in self.table.rows_of and request.tenant not in self.queue.tenants:
            self._shares.join(request.tenant, (*self.table.rows_of, *self.queue.tenants), self.now)
        is_held = isinstance(message, Submit) and not self.constrained.submit(request, message)
        if not is_held:
            self.queue.push(request)
        self._unfinished[request.id] = request
        self._deadlines.add(request)
        return not is_held

    def _is_full(self, tenant: bytes) -> bool:
        """Whether the queue has no place for another request of a tenant."""
        most, waiting = self.config.max_waiting, self.num_waiting
        if waiting < most:
            return False
        held = [request.tenant for request in self.constrained.held]
        own = self.queue.num_of(tenant) + held.count(tenant)
        return not has_share(own, 1, waiting, most, {*self.queue.tenants, *held})

    def abort(self, request_id: bytes) -> bool:
        """End a request without an answer. False when the id is unknown or the request has ended."""
        request = self._unfinished.pop(request_id, None)
        if request is None:
            return False
        self.constrained.drop(request)
        if request.slot is not None:
            self.table.end(request.slot)
        else:
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
        self.admission.retry()
        return self.pages.flush()

    def expire(self) -> list[Failure]:
        """End the requests whose deadline has passed."""
        failures = []
        for request in self._deadlines.passed(self.now):
            self.abort(request.id)
            failures.append(Failure(request.client, request.id, "deadline_exceeded", DEADLINE_EXCEEDED_MESSAGE))
        return failures

    def plan(self) -> StepPlan | None:
        """Plan the next step. None when no row can run before a launched step is completed or a request arrives."""
        self.admission.release_settled()
        if (compiled := self.constrained.take_compiled(self.now)) is not None:
            self._continue(compiled)
        is_shared = self._is_shared
        if is_shared:
            self._shares.charge_rows()
            self.admission.make_room()
        if self._step % RETRY_STEPS == 0:
            self.admission.retry()
        self._may_join = MOST_JOINING if self.expects_others else self.config.max_running
        updates: list[IntArray] = []
        decode, positions, widths = NO_PAGES, NO_PAGES, NO_PAGES
        segments = self._plan_first_prompt() if is_shared else []
        if not segments:
            decode, positions, widths = self._plan_decode(updates)
            segments = self._plan_prefill(decode, positions)
        if not len(decode) and not segments:
            if not self._launched and self.admission.preempt_for_prompts():
                segments = self._plan_prefill(decode, positions)
            if not segments:
                return None
        admitted = self.admission.take_joining()

        slots, prefill, prefill_tokens, new_rows, processors = decode, _NO_SEGMENTS, EMPTY, NO_ROWS, EMPTY
        texts, has_drafts = EMPTY, widths.sum() > len(widths)
        # Then a row may be found behind its last token, where it has no pages.
        had_drafts = bool(self._launched and self._launched[-1].drafts is not None)
        if segments:
            prefill = np.array(segments, np.int32)
            slots = np.concatenate((decode, prefill[:, 0]))
            prefill_tokens = np.concatenate(
                [self.table.tokens[slot, start : start + length] for slot, start, length, _ in segments]
            )
        if admitted:
            updates.append(self._all_pages(admitted))
            new_rows = np.stack([_sampling_row(request) for request in admitted], axis=1)
            processors = np.concatenate([encode_logits_processors(request, self.config) for request in admitted])
            if self.drafts.are_on:
                texts = self.drafts.join(admitted)
        rows, decode_ends = decode, positions + 1
        if has_drafts:
            decode, positions = with_drafts(decode, positions, widths)
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
            shared_prefixes=EMPTY
            if has_drafts or had_drafts
            else self._shared_prefixes.for_step(self.table.page_table, decode, positions),
            second_texts=self._second_texts(prefill[:, 0]),
            widths=widths,
            texts=texts,
            **self.pages.take_changes(admitted),
        )
        sampled, drafts = plan.sampled_slots, None
        if has_drafts:
            drafts = DraftRows.of(rows, widths, sampled[len(decode) :])
        ends = None if self.pages.windows is None else np.concatenate((decode_ends, prefill[:, 1] + prefill[:, 2]))
        launched = self.table.launch(slots), sampled, len(rows), drafts, self.constrained.launch(sampled), slots, ends
        self._launched.append(_Launched(self._step, *launched))
        self._step += 1
        self.counters.steps += 1
        self.counters.mixed_steps += bool(len(decode) and segments)
        self.counters.prefill_tokens += len(plan.prefill_tokens)
        size = len(sampled) + len(plan.prefill_tokens)
        self.counters.step_sizes[bisect_left(STEP_TOKENS_EDGES, size)] += 1
        self.counters.step_tokens += size
        self.admission.lower_growth()
        return plan

    def advance(self, result: StepResult, begin: BeginRows | None = None, *, consume: bool = True) -> Advanced:
        """Advance requests by the result of the oldest launched step; `output` follows. `begin` and `consume`: see
        `ConstrainedRequests.advance`."""
        launched = self._launched.popleft()
        assert result.step == launched.step, "results are out of order"
        table = self.table
        of_prompts = list(prompt_logprobs(table, result.prompt_logprobs)) if result.prompt_logprobs else []
        if (drafts := launched.drafts) is None:
            done = table.collect(launched.rows, launched.sampled, result.tokens)
            if result.verified is not None:
                decode = launched.num_decode
                self.drafts.observe(launched.sampled[:decode], result.verified.hits[:decode])
        else:
            assert result.verified is not None
            done = table.collect_drafts(launched.rows, drafts, result.tokens, result.verified.counts)
            self.drafts.observe_drafts(drafts, launched.num_decode, result.verified, done)
        if self.config.pooling is None:
            self.counters.generated_tokens += len(done.slots)
        if launched.ends is not None:
            self.pages.release_behind(launched.slots, launched.ends)
        consuming, errors = NOTHING_TO_CONSUME, _NO_ERRORS
        if len(launched.constrained):
            consuming, errors = self.constrained.advance(done, begin, consume=consume)
        return Advanced(done, result.logprobs, of_prompts, consuming, errors, result.pooled)

    def output(self, advanced: Advanced) -> StepOutput:
        """Messages for clients about a step."""
        table, done = self.table, advanced.done
        failures: list[Failure] = []
        if np.count_nonzero(done.finish):
            failures = self._forget_ended(done, advanced.errors)
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
            {} if scored is None else row_logprobs(table, scored, done),
            advanced.of_prompts,
            self._started(done) if first else {},
            table.take_resumed(slots),
            accepted,
            None if advanced.pooled is None else advanced.pooled[done.rows],
            self.drafts.predicted(slots),
        )

    def _forget_ended(self, done: Completed, errors: Mapping[int, CodedError]) -> list[Failure]:
        """Forget the requests that ended with this step. Returns the failures of those without a token."""
        failures = []
        ended = np.flatnonzero(done.finish)
        for slot, finish in zip(done.slots[ended].tolist(), done.finish[ended].tolist(), strict=True):
            request = self.table.request(slot)
            del self._unfinished[request.id]
            self.counters.finished += 1
            if finish != ERROR:
                continue
            if (error := errors.get(slot)) is not None:
                failures.append(Failure(request.client, request.id, error.code, error.message))
                continue
            self.admission.damaged.add(slot)
            message = "the model's logits are not finite; the weights or the KV cache are damaged"
            failures.append(Failure(request.client, request.id, "engine_error", message))
        return failures

    def fail(self, errors: Iterable[tuple[Request, CodedError]]) -> None:
        """End the requests that cannot continue, unless they have ended. Call it before requests are advanced by the
        step in which they cannot."""
        for request, error in errors:
            if self._unfinished.get(request.id) is request:
                self._refuse(request, error)
                self.counters.finished += 1

    def _refuse(self, request: Request, error: CodedError) -> None:
        self.abort(request.id)
        self._notices.failures.append(Failure(request.client, request.id, error.code, error.message))

    def take_notices(self) -> StepOutput | None:
        """Failures and acceptances since the last output of a step; None: there are none."""
        notices = self._notices
        if not (notices.failures or notices.accepted):
            return None
        self._notices = StepOutput.without_tokens([], [])
        return notices

    def _continue(self, compiled: Compiled) -> None:
        """Let requests continue whose constraints are compiled; others fail."""
        for request in compiled.queued:
            self.queue.push(request)
        self._notices.accepted.extend((request.client, request.id) for request in compiled.accepted)
        for request, error in compiled.refused:
            self._refuse(request, error)

    def _started(self, done: Completed) -> dict[int, tuple[float, float]]:
        """`StepOutput.started` of the rows with first tokens."""
        requests = {row: self.table.request(done.slots[row]) for row in np.flatnonzero(done.index == 0).tolist()}
        return {row: (r.admitted_at - r.queued_at, r.admitted_at) for row, r in requests.items()}

    def _plan_decode(self, updates: list[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
        """Rows that decode in this step, the positions of their input tokens, and their widths if the engine
        speculates: 1 and the drafts that are verified. Rows that need pages receive them; the changes of page tables
        are appended to `updates`."""
        table = self.table
        slots = self._shortest_first(table.decodable())
        widths = self.drafts.widths(slots, waiting=self._prompts_wait)
        needed = self._missing_pages(slots, widths)
        if count := int(needed.sum()):
            if count > self.pages.room.rows and len(widths):
                # Drafts are not worth a preemption.
                widths = np.ones_like(widths)
                needed = self._missing_pages(slots, widths)
                count = int(needed.sum())
            if count > self.pages.room.rows:
                slots = self.admission.preempt_for_pages(slots, needed)
                # Some rows pause while others grow, which changes the order by length.
                self._ordered_key = None
                widths = widths[: len(slots)]
                needed = self._missing_pages(slots, widths)
            self._grow(slots, needed, updates)
        positions = table.computed.take(slots)
        table.launch_decode(slots, positions, widths)
        if self.pages.states is not None:
            self.pages.states.decode(slots, positions)
        return slots, positions, widths

    @property
    def _prompts_wait(self) -> bool:
        """Whether the next step may compute tokens of prompts."""
        table = self.table
        for slot in table.in_prefill:
            # One that awaits its constraint computes all but its last token.
            if table.computed[slot] + table.request(slot).awaits_constraint < table.prefill_end[slot]:
                return True
        return self.admission.may_admit(self.now)

    def _missing_pages(self, slots: IntArray, widths: IntArray) -> IntArray:
        """[D] pages that rows need for all tokens of the next step, wherever the device finds that they begin."""
        table, page = self.table, self.config.page_size
        ends = table.computed.take(slots) + 1
        if widths.sum() > len(widths) or np.count_nonzero(table.drafts_in_flight):
            ends += table.drafts_in_flight.take(slots) + widths - 1
            np.minimum(ends, table.limit.take(slots) - 1, out=ends)
        missing: IntArray = np.maximum(-(-ends // page) - table.num_pages.take(slots), 0)
        return missing

    def _grow(self, slots: IntArray, needed: IntArray, updates: list[IntArray]) -> None:
        """Give rows so many pages."""
        table = self.table
        growing = np.repeat(slots, needed)
        if not len(growing):
            return
        index = table.num_pages[growing] + runs(needed)[1]
        pages = self.pages.allocate(len(growing))
        table.page_table[growing, index] = pages
        table.num_pages[slots] += needed
        updates.append(np.array((growing, index, pages)))
        if self.pages.windows is not None:
            self.pages.windows.grow(growing)

    def _shortest_first(self, rows: IntArray) -> IntArray:
        """`rows` by length, shortest first. Attention processes rows in this order, so that rows of similar length end
        together: worth 2 to 7 % of its time where lengths differ much."""
        key = rows.tobytes()
        if key != self._ordered_key:
            self._ordered_key = key
            self._ordered = rows[self.table.computed.take(rows).argsort(kind="stable")]
        # Otherwise each row has grown by one token since: a slot given to another request skips at least one plan.
        return self._ordered

    def _plan_prefill(self, decode: IntArray, positions: IntArray) -> list[Segment]:
        """Segments of prompts beside the decode rows, within the token budget: first of prompts in progress, then of
        requests that are admitted."""
        segments: list[Segment] = []
        in_progress = self.table.prefilling()
        if not in_progress and not len(self.queue):
            return segments
        budget = self._token_budget(decode, positions)
        if self._is_shared:
            in_progress.sort(key=self._shares.key)
        for request in in_progress:
            while self._is_before(request) and (new := self._admit(budget)) is not None:
                self._schedule_segment(new, budget, segments)
            if budget.is_spent:
                break
            self._schedule_segment(request, budget, segments)
        while (new := self._admit(budget)) is not None:
            self._schedule_segment(new, budget, segments)
        return segments

    def _admit(self, budget: TokenBudget) -> Request | None:
        """Give the head of the queue a row, if the plan has time for it, and the row and its pages are available."""
        if budget.is_spent or not self._may_join:
            return None
        request = self.admission.admit(self.now)
        self._may_join -= request is not None
        return request

    def _plan_first_prompt(self) -> list[Segment]:
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
            and not head.awaits_constraint
            and self.admission.admit(self.now) is not None
        )
        segments: list[Segment] = []
        if self._is_first_prompt:
            assert head is not None
            self._schedule_segment(head, TokenBudget(self.config.max_step_tokens), segments)
            # A slot in the next step may be another request's.
            self._ordered_key = None
        return segments

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

    def _token_budget(self, decode: IntArray, positions: IntArray) -> TokenBudget:
        """Budget of a step's prompts. The step is kept short when a client waits for the next token of a decode row;
        it may take longer the more prompts wait for each of these, and the longer all of them will take."""
        config = self.config
        # Texts that are pooled have captured steps for any number of them.
        most_prompts = MOST_PROMPTS if config.pooling is None else config.max_running
        left = max(config.max_step_tokens - len(decode), 1)
        budget = TokenBudget(left, len(decode), config.step_graphs, most_prompts)
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

    def _all_pages(self, joining: Iterable[Request]) -> IntArray:
        """`StepPlan.page_updates` of rows that join."""
        slots = np.array([request.slot for request in joining], np.int32)
        counts = self.table.num_pages[slots]
        rows, index = np.repeat(slots, counts), runs(counts)[1]
        return np.stack((rows, index, self.table.page_table[rows, index]))

    def _second_texts(self, slots: IntArray) -> IntArray:
        """`StepPlan.second_texts` of the segments with these slots."""
        if self.config.pooling is None:
            return EMPTY
        found = [self.table.request(slot).second_text for slot in slots.tolist()]
        return np.array(found, np.int32) if any(found) else EMPTY

    def _schedule_segment(self, request: Request, budget: TokenBudget, segments: list[Segment]) -> None:
        """Add the next segment of a prompt, if the budget has tokens for it."""
        table, slot = self.table, request.slot
        assert slot is not None
        start = int(table.computed[slot])
        # The step of the last token samples the next one, for which the constraint is needed.
        wanted = int(table.prefill_end[slot]) - start - request.awaits_constraint
        if self._is_whole and wanted > budget.left:
            # It is among the first of the next step, and shorter ones may still fit into this one.
            return
        wanted = self.pages.prompt_tokens(slot, wanted)
        length = budget.grant(start, wanted) if wanted > 0 else 0
        if not length:
            return
        self.pages.extend(slot, start, length)
        if self._is_shared:
            self._shares.charge(request.tenant, length)
        sample = table.launch_prefill(slot, length)
        segments.append((slot, start, length, int(sample)))
        # Cached immediately: steps run in order, and within a step all KV is stored before any is read. A request that
        # matches these pages from now on, even in this plan, reads them after they are written.
        self.pages.share(slot)


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
