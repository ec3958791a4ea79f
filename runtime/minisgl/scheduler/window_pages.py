"""Pages of layers with a sliding window: those that rows still read, those that only the prefix cache has, free ones.

A row holds the pages of its last `window` tokens and one more, and those of prompt tokens that launched steps compute.
What falls behind is released when the step that read it last has ended. A page that the row did not share is free
then; one that it shared stays in the prefix cache until its memory is needed.

The cache refers to a page by a number that is used once, so a page is evicted without a search for its node: the
reference is void from then on. Pages are evicted in the order in which they were last read, but some only behind all
others: the last pages of requests and of prompts, those from which a request has continued, and those of a place every
so many pages, see `checkpoint_pages`. There requests are likely to part, and they need no other pages of these layers.
Between both come the pages of a first window: requests can part behind any of them, and need those before it only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.kv_layout import KEPT_BEHIND, checkpoint_pages, row_pages
from minisgl.scheduler.pages import Owner, PagePool
from minisgl.wire.plan import NO_UPDATES, IntArray

References = NDArray[np.int64]
"""References of the prefix cache to pages of a prefix, in the order of its tokens; ABSENT: it has none."""

ABSENT: Final = -1
NO_REFERENCES: Final[References] = np.empty(0, np.int64)

_INNER: Final = 0
_FIRST_WINDOW: Final = 1
_LASTING: Final = 2
"""Worth of pages of the cache, see above."""

_VOID: Final = -2
"""Reference of pages that are not cached; no reference is equal to it."""
_PAGE_BITS: Final = 24
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1


class WindowPages:
    """Accounting of these pages. Every page has one owner; one of the cache also has as many readers as rows in whose
    window it is, and is evictable without any."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.window is not None and config.num_window_pages <= _PAGE_MASK
        pages, rows = config.num_window_pages, config.max_running
        self.pool = PagePool(pages, np.random.default_rng(config.audit_seed + 1) if config.audit else None)
        self.row_pages = row_pages(config.window, config.page_size)
        self.table: IntArray = np.zeros((rows, -(-config.max_model_len // config.page_size)), np.int32)
        """Pages by row and index; those before `first` and from `end` on are stale."""
        self.first: IntArray = np.zeros(rows, np.int32)
        """Index of the first page that each row holds."""
        self.end: IntArray = np.zeros(rows, np.int32)
        """Index behind the last one."""
        self.evictable = 0
        """Pages of the cache without readers."""
        self._window, self._page_size = config.window, config.page_size
        self._needed = -(-(config.window - 1) // config.page_size)
        """Pages that a request needs to continue a cached prefix."""
        self._stride = checkpoint_pages(config.window, config.page_size)
        self._references: References = np.full(pages, _VOID, np.int64)
        self._next_reference = 0
        self._readers: IntArray = np.zeros(pages, np.int32)
        self._worth: NDArray[np.int8] = np.zeros(pages, np.int8)
        """Queue of each page."""
        self._queues: tuple[deque[tuple[int, int]], ...] = (deque(), deque(), deque())
        """Evictable pages with the time since when they are, by their worth: all pages of a queue are evicted before
        those of the next one. An entry with another time than that of `_since` is stale."""
        self._since: NDArray[np.int64] = np.full(pages, -1, np.int64)
        self._clock = 0
        self._grown: list[IntArray] = []

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return self.pool.free + self.evictable

    def first_needed(self, tokens: int) -> int:
        """Index of the first page that the token behind `tokens` tokens attends to."""
        return max((tokens - self._window + 1) // self._page_size, 0)

    def num_usable(self, references: References) -> int:
        """Longest part of a cached prefix, in pages, that a request can continue: the pages of its last `window` tokens
        are there."""
        count = np.arange(1, len(references) + 1)
        last_absent = np.maximum.accumulate(np.where(self.is_present(references), 0, count))
        needed = np.maximum((count * self._page_size - self._window + 1) // self._page_size, 0)
        usable = np.flatnonzero(last_absent <= needed)
        return int(usable[-1]) + 1 if len(usable) else 0

    def is_present(self, references: References) -> NDArray[np.bool_]:
        """Which references [N] are valid."""
        present: NDArray[np.bool_] = self._references[_pages(references)] == references
        return present

    def read(self, references: References) -> IntArray:
        """Keep the last pages of a prefix that a request continues, for a row that reads them. Returns them."""
        held = references[self._held_from(references) :]
        pages = _pages(held)
        self._worth[pages] = _LASTING
        idle = pages[self._readers[pages] == 0]
        self.evictable -= len(idle)
        self._since[idle] = -1
        self._readers[pages] += 1
        return pages

    def unread(self, pages: IntArray) -> None:
        """Undo `read`, for pages of any number of rows. The last one is evicted first: a prefix is of use without its
        continuation."""
        np.subtract.at(self._readers, pages, 1)
        idle = pages[self._readers[pages] == 0][::-1]
        idle = idle[np.sort(np.unique(idle, return_index=True)[1])]
        self.evictable += len(idle)
        since = np.arange(self._clock, self._clock + len(idle))
        self._clock += len(idle)
        self._since[idle] = since
        entries = zip(idle.tolist(), since.tolist(), self._worth[idle].tolist(), strict=True)
        for page, time, worth in entries:
            self._queues[worth].append((page, time))
        for queue in self._queues:
            if len(queue) > 2 * len(self._since) + 64:
                current = [entry for entry in queue if self._since[entry[0]] == entry[1]]
                queue.clear()
                queue.extend(current)

    def attach(self, slot: int, pages: IntArray, end: int) -> None:
        """Give the result of `read` for a prefix of `end` pages to a row that begins with it."""
        self.first[slot], self.end[slot] = end - len(pages), end
        self.table[slot, end - len(pages) : end] = pages

    def extend(self, slot: int, end: int) -> None:
        """Give a row pages up to index `end`, if it has not; they are available."""
        begin = int(self.end[slot])
        if end <= begin:
            return
        pages = self._allocate(end - begin)
        self.table[slot, begin:end] = pages
        self.end[slot] = end
        self._grown.append(
            np.stack((np.full(len(pages), slot, np.int32), np.arange(begin, end, dtype=np.int32), pages))
        )

    def grow(self, slots: IntArray) -> None:
        """Give each row in decode a page more; they are available."""
        if not len(slots):
            return
        index, pages = self.end[slots], self._allocate(len(slots))
        self.table[slots, index] = pages
        self.end[slots] += 1
        self._grown.append(np.stack((slots, index, pages)))

    def take_updates(self, joining: Collection[int]) -> IntArray:
        """`StepPlan.window_updates` since the last call, with all pages of the rows `joining`."""
        parts = [part for part in self._grown if int(part[0, 0]) not in joining]
        for slot in joining:
            index = np.arange(self.first[slot], self.end[slot], dtype=np.int32)
            parts.append(np.stack((np.full(len(index), slot, np.int32), index, self.table[slot, index])))
        self._grown.clear()
        return np.concatenate(parts, axis=1) if parts else NO_UPDATES

    def release_behind(self, slots: IntArray, ends: IntArray, prompts: IntArray) -> None:
        """Release the pages that no later step of the rows reads: the steps that computed the first `ends` [R] tokens
        of the `slots` [R] have ended. `prompts` [R]: lengths of their prompts."""
        first = (ends - (self._window - 1)) // self._page_size - KEPT_BEHIND
        before = self.first.take(slots)
        behind = first > before
        if not np.count_nonzero(behind):
            return
        slots, first, before = slots[behind], first[behind], before[behind]
        counts = first - before
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        self.first[slots] = first
        index = np.repeat(before, counts) + within
        pages = self.table[np.repeat(slots, counts), index]
        at_checkpoint = index % self._stride >= self._stride - self._needed
        prompt_ends = np.repeat(prompts[behind] // self._page_size, counts)
        at_end = (index < prompt_ends) & (index >= prompt_ends - self._needed)
        worth = np.select([at_checkpoint | at_end, index < self._needed], [_LASTING, _FIRST_WINDOW], _INNER)
        self._worth[pages] = np.maximum(self._worth[pages], worth)
        self._leave(pages)

    def release(self, slot: int, *, keep: bool) -> None:
        """Release all pages of a settled row. `keep`: a request is likely to continue behind them."""
        pages = self._pages(slot)
        self.first[slot] = self.end[slot] = 0
        if keep:
            self._worth[pages] = _LASTING
        self._leave(pages)

    def reclaimable(self, slot: int) -> int:
        """Number of pages that become available when the row is released."""
        pages = self._pages(slot)
        return int(np.count_nonzero((self.pool.owner[pages] == Owner.ROW) | (self._readers[pages] == 1)))

    def missing(self, rows: NDArray[np.bool_], lengths: IntArray, growth: NDArray[np.float64]) -> float:
        """Pages that the R rows of the mask `rows` will hold besides those that they have, when their `lengths` [R]
        tokens are computed and `growth` [R] more; on average, since growth is an estimate."""
        held = self.end[rows] - self.first[rows]
        for_lengths = np.maximum(np.minimum(-(-lengths // self._page_size), self.row_pages), held)
        more = np.minimum(growth / self._page_size, np.maximum(self.row_pages - for_lengths, 0))
        return float((for_lengths - held + more).sum())

    def missing_behind(self, read: IntArray, length: int, growth: float = 0.0) -> float:
        """The same for a request of `length` tokens behind a prefix whose pages `read` it holds."""
        for_length = max(min(-(-length // self._page_size), self.row_pages), len(read))
        return for_length - len(read) + min(growth / self._page_size, max(self.row_pages - for_length, 0))

    def offered(self, slot: int, begin: int, end: int) -> References:
        """New references to the pages of a row at the indices from `begin` to `end`; ABSENT where it holds none, or has
        given it to the cache. Pass those that the cache takes to `cache`."""
        found = np.full(end - begin, ABSENT, np.int64)
        held = max(begin, int(self.first[slot]))
        pages = self.table[slot, held : min(end, int(self.end[slot]))]
        numbers = np.arange(self._next_reference, self._next_reference + len(pages))
        self._next_reference += len(pages)
        own = self.pool.owner[pages] == Owner.ROW
        found[held - begin : held - begin + len(pages)] = np.where(own, numbers << _PAGE_BITS | pages, ABSENT)
        return found

    def cache(self, references: References, *, keep: bool = False) -> None:
        """Make the cache the owner of these pages, which their row still reads."""
        references = references[references != ABSENT]
        pages = _pages(references)
        self.pool.transfer_to_cache(pages)
        self._references[pages] = references
        self._readers[pages] = 1
        self._worth[pages] = _LASTING if keep else _INNER

    def drop(self, references: References) -> None:
        """Forget what the cache refers to no longer. A row that reads such a page is its owner again: it has offered
        the page to a prefix that it does not lock."""
        pages = _pages(references[self.is_present(references)])
        idle = self._readers[pages] == 0
        self._forget(pages[idle])
        self._references[pages] = _VOID
        read = pages[~idle]
        assert (self._readers[read] == 1).all(), "a page that several rows read leaves the cache"
        self._readers[read] = 0
        self.pool.owner[read] = Owner.ROW

    def flush(self) -> None:
        """Free all evictable pages."""
        self._evict(self.evictable)

    def _held_from(self, references: References) -> int:
        """Index of the first page that a row behind a usable prefix holds."""
        needed = min(self.first_needed(len(references) * self._page_size), len(references))
        more = max(needed - KEPT_BEHIND, 0)
        return more if self.is_present(references[more:needed]).all() else needed

    def _pages(self, slot: int) -> IntArray:
        return self.table[slot, self.first[slot] : self.end[slot]]

    def _leave(self, pages: IntArray) -> None:
        """Release pages that their rows do not read any more."""
        own = self.pool.owner[pages] == Owner.ROW
        self.pool.release(pages[own])
        if not own.all():
            self.unread(pages[~own])

    def _allocate(self, count: int) -> IntArray:
        if count > self.pool.free:
            self._evict(count - self.pool.free)
        pages = self.pool.allocate(count)
        self._worth[pages] = _INNER
        return pages

    def _evict(self, count: int) -> None:
        """Free `count` evictable pages."""
        found: list[int] = []
        for queue in self._queues:
            while len(found) < count and queue:
                page, since = queue.popleft()
                if self._since[page] == since:
                    found.append(page)
        assert len(found) == count, "pages must be evicted within `evictable`"
        self._forget(np.array(found, np.int32))

    def _forget(self, pages: IntArray) -> None:
        """Free pages of the cache that nobody reads."""
        self._references[pages] = _VOID
        self._since[pages] = -1
        self.evictable -= len(pages)
        self.pool.release(pages)


def _pages(references: References) -> IntArray:
    """Pages of references; 0 for ABSENT."""
    return np.where(references == ABSENT, 0, references & _PAGE_MASK).astype(np.int32)
