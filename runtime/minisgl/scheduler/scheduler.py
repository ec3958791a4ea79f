"""What runs in the next step: admission, pages, prefix cache and the token budget. No I/O, no clock, no device."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.scheduler.logits_processors import encode_logits_processors
from minisgl.scheduler.logprobs import prompt_logprobs, row_logprobs
from minisgl.scheduler.pages import NO_PAGES, Owner, PagePool
from minisgl.scheduler.prefix_cache import NaiveCache, PrefixCache
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.request import ERROR, Completed, Phase, Request, RequestTable
from minisgl.scheduler.shared_prefixes import SharedPrefixes
from minisgl.scheduler.step_output import DEADLINE_MESSAGE, Counters, Failure, RequestError, StepOutput
from minisgl.scheduler.validation import request_from_submit
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, SamplingParams, Submit
from minisgl.wire.plan import EMPTY, NO_ROWS, NO_UPDATES, IntArray, StepPlan, StepResult

_NO_SEGMENTS = np.empty((0, 4), np.int32)

GROWTH_SHARE_START = 0.5
"""Optimistic admission: the share of what running requests may still generate that a newcomer must leave free."""
GROWTH_SHARE_MIN = 0.05
GROWTH_SHARE_DECAY = 0.998
GROWTH_SHARE_RAISE = 0.2
"""Added at a preemption: the guess was too low."""
GROWTH_TOKENS_MAX = 4096
"""No request is expected to generate more: max_tokens is often just what the context leaves."""
RETRY_STEPS = 64
"""A queue head that found no room is tried again after so many steps even if no page was released."""


class _Launched(msgspec.Struct, frozen=True):
    step: int
    mask: IntArray
    """[rows] 1 for the rows that took part."""
    sampled: IntArray


class Scheduler:
    """Call `plan` and `complete` in turn, each result in the order of its plan; with overlap the result of a plan
    is completed after the next one is made."""

    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        page = config.page_size
        if config.num_pages * page < config.max_model_len:
            raise ValueError(
                f"{config.num_pages} pages of {page} tokens cannot hold one request of max_model_len "
                f"{config.max_model_len}: lower it, or give more memory"
            )
        self.config = config
        self.epoch = epoch
        self.counters = Counters()
        self.now = 0.0
        """Seconds, by a clock of the caller's, who sets it: times in the counters are by it."""
        self.pool = PagePool(config.num_pages, np.random.default_rng(config.audit_seed) if config.audit else None)
        self.cache: PrefixCache = RadixCache(page) if config.cache == "radix" else NaiveCache()
        self.table = RequestTable(
            rows=config.max_running,
            max_length=config.max_model_len,
            max_pages=-(-config.max_model_len // page),
            vocab_size=config.vocab_size,
            eos_ids=config.eos_token_ids,
        )
        self.queue = WaitingQueue()
        self._alive: dict[bytes, Request] = {}
        self._deadlines: list[tuple[int, int, Request]] = []
        self._handles: list[Any] = [self.cache.root] * config.max_running
        # A row is detached once the cache holds the continuation of its prefix in other pages than the row's:
        # to lock those too could take more pages than a request may hold, so it goes on in its own until its end.
        self._detached: NDArray[np.bool_] = np.zeros(config.max_running, np.bool_)
        self._failed_rows: set[int] = set()
        self._launched: deque[_Launched] = deque()
        self._shared_prefixes = SharedPrefixes(page)
        self._ordered_key: bytes | None = None
        self._ordered: IntArray = NO_PAGES
        self._arrivals = 0
        self._step = 0
        self._growth_share = GROWTH_SHARE_START
        self._blocked: Request | None = None
        """The head of the queue that found no room; tried again when pages were released."""

    @property
    def has_work(self) -> bool:
        return bool(self.table.num_in_use or len(self.queue) or self._launched)

    @property
    def available_pages(self) -> int:
        return self.pool.free + self.cache.evictable_pages

    def submit(self, message: Submit, client: int = 0) -> None:
        """Queue a request. Raises RequestError."""
        if message.id in self._alive:
            raise RequestError("duplicate_request", "a request with this id is being served already")
        if len(self.queue) >= self.config.max_waiting:
            raise RequestError("queue_full", f"{len(self.queue)} requests are waiting already; try again later")
        request = request_from_submit(message, client=client, arrival=self._arrivals, now=self.now, config=self.config)
        self._arrivals += 1
        self._alive[request.id] = request
        self.queue.push(request)
        if request.deadline_ms:
            heapq.heappush(self._deadlines, (request.deadline_ms, request.arrival, request))
            if len(self._deadlines) > 2 * len(self._alive) + 64:
                self._deadlines = [entry for entry in self._deadlines if self._alive.get(entry[2].id) is entry[2]]
                heapq.heapify(self._deadlines)
        self.counters.prompt_tokens += request.prompt_length

    def abort(self, request_id: bytes) -> bool:
        """End a request without an answer; False when it is not (or no longer) known."""
        request = self._alive.pop(request_id, None)
        if request is None:
            return False
        if request.slot is None:
            self.queue.remove(request_id)
        else:
            self.table.end(request.slot)
        return True

    def drop_client(self, client: int) -> None:
        """The client is gone: abort what it asked for."""
        for request in list(self._alive.values()):
            if request.client == client:
                self.abort(request.id)

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request has locked; how many pages that frees."""
        pages = self.cache.evict(self.cache.evictable_pages)
        self.pool.release(pages)
        self.counters.evicted_pages += len(pages)
        self._blocked = None
        return len(pages)

    def expire(self, now_ms: int) -> list[Failure]:
        """End the requests whose deadline has passed."""
        failures = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            request = heapq.heappop(self._deadlines)[2]
            if self._alive.get(request.id) is request:
                self.abort(request.id)
                failures.append(Failure(request.client, request.id, "deadline_exceeded", DEADLINE_MESSAGE))
        return failures

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can run before a launched step is collected or a request arrives."""
        for slot in self.table.settled():
            self._release(slot)
        if self._step % RETRY_STEPS == 0:
            self._blocked = None
        updates: list[IntArray] = []
        decode, positions = self._plan_decode(updates)
        segments, new_rows, processors = self._plan_prefill(max(self.config.max_step_tokens - len(decode), 1), updates)
        if not len(decode) and not segments:
            return None

        slots, prefill, prefill_tokens = decode, _NO_SEGMENTS, NO_PAGES
        if segments:
            prefill = np.array(segments, np.int32)
            slots = np.concatenate((decode, prefill[:, 0]))
            prefill_tokens = np.concatenate(
                [self.table.tokens[slot, start : start + length] for slot, start, length, _ in segments]
            )
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
            page_updates=_joined(updates),
            new_rows=np.stack(new_rows, axis=1) if new_rows else NO_ROWS,
            poison_pages=self.pool.take_freed(),
            logits_processors=np.concatenate(processors) if processors else EMPTY,
            shared_prefixes=self._shared_prefixes.of(self.table.page_table, decode, positions),
        )
        self._launched.append(_Launched(self._step, self.table.launch(slots), plan.sampled_slots))
        self._step += 1
        self.counters.steps += 1
        self.counters.mixed_steps += bool(len(decode) and segments)
        self.counters.prefill_tokens += len(plan.prefill_tokens)
        size = len(decode) + len(plan.prefill_tokens)
        self.counters.step_sizes[bisect_left(STEP_TOKENS_EDGES, size)] += 1
        self.counters.step_tokens += size
        self._growth_share = max(self._growth_share * GROWTH_SHARE_DECAY, GROWTH_SHARE_MIN)
        return plan

    def complete(self, result: StepResult) -> StepOutput:
        """Take in the result of the oldest launched step."""
        launched = self._launched.popleft()
        assert result.step == launched.step, "results come in the order of their plans"
        table = self.table
        of_prompts = list(prompt_logprobs(table, result.prompt_logprobs)) if result.prompt_logprobs else []
        done = table.collect(launched.mask, launched.sampled, result.tokens)
        self.counters.generated_tokens += len(done.slots)
        failures = []
        if np.count_nonzero(done.finish):
            failures = self._forget_ended(done)
            if failures:
                done = done[done.finish != ERROR]
        slots = done.slots
        scored, first = result.logprobs, np.count_nonzero(done.index) < len(slots)
        return StepOutput(
            table.ids.take(slots),
            table.client.take(slots),
            done.index,
            done.tokens,
            done.finish,
            table.cached.take(slots),
            failures,
            {} if scored is None else row_logprobs(table, scored, launched.sampled, slots),
            of_prompts,
            self._started(done) if first else {},
        )

    def _forget_ended(self, done: Completed) -> list[Failure]:
        """Forget the requests that ended with this step; failures of those without a token."""
        failures = []
        ended = np.flatnonzero(done.finish)
        for slot, finish in zip(done.slots[ended].tolist(), done.finish[ended].tolist(), strict=True):
            request = self.table.request(slot)
            del self._alive[request.id]
            self.counters.finished += 1
            if finish == ERROR:
                self._failed_rows.add(slot)
                message = "the model's logits are not finite; the weights or the KV cache are damaged"
                failures.append(Failure(request.client, request.id, "engine_error", message))
        return failures

    def _started(self, done: Completed) -> dict[int, tuple[float, float]]:
        """`StepOutput.started` of the rows with first tokens."""
        requests = {row: self.table.request(done.slots[row]) for row in np.flatnonzero(done.index == 0).tolist()}
        return {row: (r.admitted_at - r.queued_at, r.admitted_at) for row, r in requests.items()}

    def _plan_decode(self, updates: list[IntArray]) -> tuple[IntArray, IntArray]:
        """Rows that decode in this step and the positions of their input tokens; pages where they need one."""
        table = self.table
        slots = self._by_length(table.decodable())
        positions = table.computed.take(slots)
        needs_page = positions >= table.num_pages.take(slots) * self.config.page_size
        count = int(np.count_nonzero(needs_page))
        if count:
            if count > self.available_pages:
                slots = self._relieve(slots, needs_page)
                # Some rows pause while others grow.
                self._ordered_key = None
                positions = table.computed[slots]
                needs_page = positions >= table.num_pages[slots] * self.config.page_size
            growing = slots[needs_page]
            index = table.num_pages[growing]
            pages = self._allocate(len(growing))
            table.page_table[growing, index] = pages
            table.num_pages[growing] += 1
            updates.append(np.array((growing, index, pages)))
        table.launch_decode(slots, positions)
        return slots, positions

    def _by_length(self, rows: IntArray) -> IntArray:
        """Shortest first: attention takes rows in this order, and rows of like length end together, which is worth 2
        to 7 % of its time where lengths differ much."""
        key = rows.tobytes()
        if key != self._ordered_key:
            self._ordered_key = key
            self._ordered = rows[self.table.computed.take(rows).argsort(kind="stable")]
        # Else each of them has grown by one token since: a slot that changes hands is out of at least one plan.
        return self._ordered

    def _plan_prefill(
        self, budget: int, updates: list[IntArray]
    ) -> tuple[list[tuple[int, int, int, int]], list[IntArray], list[IntArray]]:
        """Segments (slot, start, length, sample) of at most `budget` tokens: first what is under way, then
        newcomers. And the sampling parameters and logits processors of the newcomers' rows."""
        segments: list[tuple[int, int, int, int]] = []
        new_rows: list[IntArray] = []
        processors: list[IntArray] = []
        for request in self.table.prefilling():
            if not budget:
                break
            assert request.slot is not None
            budget -= self._launch_segment(request.slot, budget, segments)
        while budget:
            newcomer = self._admit()
            if newcomer is None:
                break
            slot = newcomer.slot
            assert slot is not None
            count = int(self.table.num_pages[slot])
            updates.append(np.stack((np.full(count, slot), np.arange(count), self.table.pages(slot))).astype(np.int32))
            new_rows.append(_sampling_row(slot, newcomer.params))
            if (encoded := encode_logits_processors(newcomer, self.config)) is not None:
                processors.append(encoded)
            budget -= self._launch_segment(slot, budget, segments)
        return segments, new_rows, processors

    def _launch_segment(self, slot: int, budget: int, segments: list[tuple[int, int, int, int]]) -> int:
        table = self.table
        start = int(table.computed[slot])
        length = min(int(table.prefill_end[slot]) - start, budget)
        sample = table.launch_prefill(slot, length)
        segments.append((slot, start, length, int(sample)))
        # Cached at once: steps run in order, and within a step all KV is stored before any is read, so whoever
        # matches these pages from now on, in this very plan even, reads them after they are written.
        self._share(slot)
        return length

    def _admit(self) -> Request | None:
        """Give the head of the queue a row and the pages of its prompt, if there is room."""
        request = self.queue.peek()
        if request is None or not self.table.has_free_row or request is self._blocked:
            return None
        handle, cached = self.cache.match(request.reusable, request.cache_salt)
        self.cache.lock(handle)
        needed = -(-len(request.tokens) // self.config.page_size) - len(cached)
        if self.table.num_in_use and needed + self._expected_growth(request) > self.available_pages:
            self.cache.unlock(handle)
            self._blocked = request
            return None
        self.queue.pop()
        first_time = request.cached is None
        slot = self.table.admit(request, cached, self._allocate(needed), self.config.page_size)
        self._handles[slot] = handle
        self._detached[slot] = False
        if first_time:
            assert request.cached is not None
            self.counters.cached_tokens += request.cached
            request.admitted_at = self.now
            waited = self.now - request.queued_at
            self.counters.queue_times[bisect_left(QUEUE_TIME_EDGES, waited)] += 1
            self.counters.queue_seconds += waited
        return request

    def _expected_growth(self, newcomer: Request) -> int:
        """Pages that must stay free for what the running requests and the newcomer will probably generate."""
        table = self.table
        running = (table.phase == Phase.PREFILL) | (table.phase == Phase.DECODE)
        left = np.append(table.limit[running] - table.length[running], newcomer.limit - len(newcomer.tokens))
        tokens = np.minimum(left, GROWTH_TOKENS_MAX) * self._growth_share
        return int((tokens / self.config.page_size).sum())

    def _allocate(self, count: int) -> IntArray:
        missing = count - self.pool.free
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.pool.release(evicted)
            self.counters.evicted_pages += len(evicted)
        return self.pool.allocate(count)

    def _relieve(self, slots: IntArray, needs_page: NDArray[np.bool_]) -> IntArray:
        """Too few pages for the rows that need one: preempt the worst requests, and return the rows that decode
        in this step. A preempted row that is in flight lets go of its pages one step later; until then rows that
        get no page pause."""
        table = self.table
        running = [request for request in table.requests if request is not None and request.slot is not None]
        running = [r for r in running if table.phase[r.slot] in (Phase.PREFILL, Phase.DECODE)]
        running.sort(key=lambda request: request.order)
        growing = set(slots[needs_page].tolist())
        coming = sum(self._held_pages(slot) for slot in table.unsettled)
        preempted: set[int] = set()
        while len(growing) > self.available_pages + coming and len(running) > 1:
            victim = running.pop().slot
            assert victim is not None
            table.preempt(victim)
            self.counters.preemptions += 1
            growing.discard(victim)
            preempted.add(victim)
            if table.in_flight[victim] == 0:
                self._release(victim)
            else:
                coming += self._held_pages(victim)
        if preempted:
            self._growth_share = min(self._growth_share + GROWTH_SHARE_RAISE, 1.0)
        granted = [r.slot for r in running if r.slot in growing][: self.available_pages]
        paused = growing.difference(granted)
        stays = [slot for slot in slots.tolist() if slot not in preempted and slot not in paused]
        return np.array(stays, np.int32)

    def _held_pages(self, slot: int) -> int:
        """At least so many pages are there for others when the row is released."""
        own = int(np.count_nonzero(self.pool.owner[self.table.pages(slot)] == Owner.ROW))
        return own + self.cache.pages_freed_by_unlock(self._handles[slot])

    def _share(self, slot: int) -> None:
        """Let the cache have the row's new full pages; the row goes on reading them, locked."""
        table, page = self.table, self.config.page_size
        seen, full = int(table.inserted[slot]), int(table.computed[slot]) // page
        if full == seen or self._detached[slot]:
            return
        handle = self._handles[slot]
        tokens = table.tokens[slot, seen * page : full * page]
        if self.cache.continues(handle, tokens):
            self._detached[slot] = True
            return
        pages = table.page_table[slot, seen:full]
        longer, known = self.cache.insert(handle, tokens, pages)
        assert known == 0
        self.pool.give_to_cache(pages)
        self.cache.lock(longer)
        self.cache.unlock(handle)
        self._handles[slot] = longer
        table.inserted[slot] = full

    def _release(self, slot: int) -> None:
        """A settled row: what it computed goes to the cache, its other pages and the row are free again. A
        preempted request goes back to the queue."""
        table, page = self.table, self.config.page_size
        preempting = table.phase[slot] == Phase.PREEMPTING
        handle = self._handles[slot]
        failed = slot in self._failed_rows
        if not failed:
            seen = int(table.inserted[slot])
            full = min(int(table.computed[slot]), int(table.length[slot])) // page
            if full > seen:
                pages = table.page_table[slot, seen:full]
                tokens = table.tokens[slot, seen * page : full * page]
                _, known = self.cache.insert(handle, tokens, pages)
                self.pool.give_to_cache(pages[known:])
        self.cache.unlock(handle)
        self._handles[slot] = self.cache.root
        if failed:
            # Pages that gave logits which are not finite must not be found again, the prompt's included.
            self._failed_rows.discard(slot)
            self.pool.release(self.cache.discard(handle))
        pages = table.pages(slot)
        self.pool.release(pages[self.pool.owner[pages] == Owner.ROW])
        request = table.release(slot)
        if preempting:
            self.queue.push(request)
        self._blocked = None


def _joined(updates: list[IntArray]) -> IntArray:
    """`StepPlan.page_updates` of [3, U] each. Most steps have those of the decode rows only."""
    match updates:
        case []:
            return NO_UPDATES
        case [only]:
            return only
    return np.concatenate(updates, axis=1)


def _sampling_row(slot: int, params: SamplingParams) -> IntArray:
    """One column of `StepPlan.new_rows`."""
    floats = np.array((params.temperature, params.top_p, params.min_p), np.float32).view(np.int32)
    seed = np.array((params.seed,), np.int64).view(np.int32)
    return np.array((slot, floats[0], params.top_k, floats[1], floats[2], seed[0], seed[1]), np.int32)
