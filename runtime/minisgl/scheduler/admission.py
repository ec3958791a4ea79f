"""The way of requests from the queue to a row and back: admission, preemption and release."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.scheduler.pages import Room
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.request import Phase, Request, RequestTable
from minisgl.scheduler.row_pages import LockedPrefix, RowPages
from minisgl.scheduler.shares import Shares
from minisgl.wire.messages import QUEUE_TIME_EDGES, Counters
from minisgl.wire.plan import IntArray

GROWTH_SHARE_START: Final = 0.5
"""Optimistic admission: the share of the tokens that running requests may still generate for which a new request must
leave free pages."""
GROWTH_SHARE_MIN: Final = 0.05
GROWTH_SHARE_DECAY: Final = 0.998
GROWTH_SHARE_RAISE: Final = 0.2
"""Added at a preemption, since the estimate was too low."""
GROWTH_TOKENS_MAX: Final = 4096
"""Upper bound of the growth expected of one request: max_tokens is often just what the context leaves."""
KEPT_ROWS: Final = 2
"""Most rows that are kept free for further tenants: one for the next request, while that of the last one is in flight
once more."""
KEPT_ROWS_OF: Final = 8
"""Rows for each that is kept."""


class Admission:
    """Gives rows and pages to requests of the queue, and takes both back."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: RequestTable,
        pages: RowPages,
        queue: WaitingQueue,
        shares: Shares,
        counters: Counters,
    ) -> None:
        self._table = table
        self._pages = pages
        self._queue = queue
        self._counters = counters
        self.damaged: set[int] = set()
        """Rows whose logits were not finite, until they are released."""
        self._page_size = config.page_size
        self._shares = shares
        self._joining: dict[int, Request] = {}
        """Admitted requests by row, of which no plan has told the engine yet: all that a prompt may compute before its
        constraint is compiled can be cached."""
        self._growth_share = GROWTH_SHARE_START
        self._blocked_head: Request | None = None
        """Head of the queue that did not fit; tried again when pages were released."""
        self._hopeless_head: Request | None = None
        """The same, if it would not fit either with all pages that other tenants could give up."""
        self._growing: int | None = None
        """Tokens that rows may still generate, as far as they count, within a plan; None: not counted yet. No matter
        where layers have windows, whose pages depend on each row."""
        self._kept_rows = min(KEPT_ROWS, config.max_running // KEPT_ROWS_OF)

    def retry(self) -> None:
        """Try the head of the queue again, whether or not pages were released since it did not fit."""
        self._blocked_head = self._hopeless_head = None

    def may_admit(self, now: float) -> bool:
        """Whether the head of the queue may get a row in the next plan."""
        head = self._queue.peek()
        if head is None or head is self._blocked_head or not self._table.has_free_row:
            return False
        return not self.keeps_row_from(head, self._table.num_free_rows, now)

    def admit(self, now: float) -> Request | None:
        """Give the head of the queue a row and the pages of its prompt, if they are available. `now`: see
        `Scheduler.now`."""
        request = self._queue.peek()
        if request is None or not self._table.has_free_row or request is self._blocked_head:
            return None
        if self.keeps_row_from(request, self._table.num_free_rows, now):
            return None
        prefix = self._pages.lock_prefix(request)
        if self._pages.awaits_state(request, prefix):
            self._pages.unlock(prefix)
            return None
        cached = prefix.pages
        needed = self._missing_pages(request, cached)
        if self._table.num_in_use and not self._pages.room.holds(self._expected_need(request, prefix, needed)):
            self._pages.unlock(prefix)
            self._blocked_head = request
            return None
        self._queue.pop()
        if self._growing is not None:
            self._growing += _growth(request)
        first_time = request.cached is None
        own = self._pages.allocate(needed)
        slot = self._table.admit(request, cached, own, self._page_size, self._pages.next_row())
        self._pages.attach(slot, prefix)
        self._joining[slot] = request
        if first_time:
            assert request.cached is not None
            self._counters.prompt_tokens += request.prompt_length
            self._counters.cached_tokens += request.cached
            request.admitted_at = now
            waited = now - request.queued_at
            self._counters.queue_times[bisect_left(QUEUE_TIME_EDGES, waited)] += 1
            self._counters.queue_seconds += waited
        return request

    def take_joining(self) -> list[Request]:
        """Requests that were admitted since the last call and have their rows still."""
        joining = list(self._joining.values())
        self._joining.clear()
        return joining

    def lower_growth(self) -> None:
        """Expect a little less growth of running requests, as at each step."""
        self._growth_share = max(self._growth_share * GROWTH_SHARE_DECAY, GROWTH_SHARE_MIN)

    def keeps_row_from(self, request: Request, free_rows: int, now: float) -> bool:
        """Whether the last free rows are kept for tenants with fewer rows, since several have been here. It takes two
        steps to take a row from another one."""
        return (
            free_rows <= self._kept_rows and self._shares.expects_others(now) and self._shares.has_most(request.tenant)
        )

    def _expected_need(self, new: Request, prefix: LockedPrefix, missing: int) -> Room:
        """Pages that must be free for the `missing` ones of a new request behind `prefix`, and for the tokens that it
        and running requests will probably generate."""
        own = _growth(new) * self._growth_share
        if (windows := self._pages.windows) is None:
            if self._growing is None:
                self._growing = int(self._growth_of_rows()[1].sum())
            return Room(missing + int((self._growing * self._growth_share + own) / self._page_size), 0)
        running, growth = self._growth_of_rows()
        others = windows.missing(
            running, self._table.length[running], np.multiply(growth, self._growth_share, dtype=np.float64)
        )
        return Room(
            missing + int((int(growth.sum()) * self._growth_share + own) / self._page_size),
            int(others + windows.missing_behind(prefix.windows, len(new.tokens), own)),
        )

    def _growth_of_rows(self) -> tuple[NDArray[np.bool_], IntArray]:
        """Which rows run [rows], and the tokens that each of these may generate, as far as they count."""
        table = self._table
        running = (table.phase == Phase.PREFILL) | (table.phase == Phase.DECODE)
        return running, np.minimum(table.limit[running] - table.length[running], GROWTH_TOKENS_MAX)

    def make_room(self) -> None:
        """Preempt a row for the head of the queue if its tenant has fewer than another one, unless enough rows will be
        free one step later."""
        table, head = self._table, self._queue.peek()
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

    def preempt_for_pages(self, slots: IntArray, needed: IntArray) -> IntArray:
        """Preempt the requests of lowest priority when rows need more pages, `needed` [D], than are available.

        Returns the rows that decode in this step. A preempted row that is in flight frees its pages one step later;
        until then rows without a page pause.
        """
        table = self._table
        running = self._running()
        growing = {slot: count for slot, count in zip(slots.tolist(), needed.tolist(), strict=True) if count}
        coming = self._pages.reclaimable(table.unsettled)
        preempted: set[int] = set()
        while sum(growing.values()) > self._pages.room.plus(coming).rows and len(running) > 1:
            victim = running.pop().slot
            assert victim is not None
            self._preempt(victim)
            growing.pop(victim, None)
            preempted.add(victim)
            if table.in_flight[victim]:
                coming = coming.plus(self._pages.reclaimable([victim]))
        if preempted:
            self._growth_share = min(self._growth_share + GROWTH_SHARE_RAISE, 1.0)
        left, paused = self._pages.room.rows, set()
        for request in running:
            count = growing.get(request.slot, 0) if request.slot is not None else 0
            if count > left:
                paused.add(request.slot)
            else:
                left -= count
        stays = [slot for slot in slots.tolist() if slot not in preempted and slot not in paused]
        return np.array(stays, np.int32)

    def preempt_for_prompts(self) -> bool:
        """Preempt the requests of lowest priority if no prompt can be computed because all pages of layers with a
        window are those of other prompts, which are computed in part. Call it while no step is launched and nothing
        else can run. True: a prompt can be computed now."""
        windows, running = self._pages.windows, self._running()
        if windows is None or windows.available or len(running) < 2:
            return False
        while not windows.available and len(running) > 1:
            victim = running.pop().slot
            assert victim is not None
            self._preempt(victim)
        return True

    def _running(self) -> list[Request]:
        """Requests in prefill and decode, by priority."""
        table = self._table
        running = [request for request in table.requests if request is not None and request.slot is not None]
        running = [r for r in running if table.phase[r.slot] in (Phase.PREFILL, Phase.DECODE)]
        return sorted(running, key=lambda request: request.priority_key)

    def release_settled(self) -> None:
        """Free the rows that ended or were preempted and are in no launched step any more, as at the begin of a
        plan."""
        self._growing = None
        for slot in self._table.settled():
            self._release(slot)

    def _fits_without(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether there are pages for a prompt when these rows are released."""
        prefix = self._pages.lock_prefix(request)
        windows = self._pages.windows
        needed = Room(
            self._missing_pages(request, prefix.pages),
            0 if windows is None else int(windows.missing_behind(prefix.windows, len(request.tokens))),
        )
        slots = [*self._table.unsettled, *(other.slot for other in others if other.slot is not None)]
        fits = self._pages.room.plus(self._pages.reclaimable(slots)).holds(needed)
        self._pages.unlock(prefix)
        return fits

    def _missing_pages(self, request: Request, cached: IntArray) -> int:
        """Number of pages that a prompt needs besides cached ones."""
        return -(-len(request.tokens) // self._page_size) - len(cached)

    def _preempt(self, slot: int) -> None:
        self._growing = None
        self._table.preempt(slot)
        self._counters.preemptions += 1
        if self._table.in_flight[slot] == 0:
            self._release(slot)

    def _release(self, slot: int) -> None:
        """Free a settled row; a preempted request goes back to the queue."""
        preempting = self._table.phase[slot] == Phase.PREEMPTING
        self._pages.release(slot, damaged=slot in self.damaged)
        self.damaged.discard(slot)
        self._joining.pop(slot, None)
        request = self._table.release(slot)
        if preempting:
            self._queue.push(request)
        self._blocked_head = self._hopeless_head = None


def _growth(request: Request) -> int:
    """Tokens that a request may generate, as far as they count."""
    return min(request.limit - len(request.tokens), GROWTH_TOKENS_MAX)
