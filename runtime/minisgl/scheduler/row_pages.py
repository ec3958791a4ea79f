"""KV pages of the rows: allocated from the pool, shared through the prefix cache, and freed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.scheduler.pages import Owner, PagePool
from minisgl.scheduler.prefix_cache import NaiveCache, PrefixCache
from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.request import Request, RequestTable
from minisgl.wire.messages import Counters
from minisgl.wire.plan import IntArray


class RowPages:
    """The page pool and the prefix cache, and which cached prefix each row has locked."""

    def __init__(self, config: SchedulerConfig, table: RequestTable, counters: Counters) -> None:
        self.pool = PagePool(config.num_pages, np.random.default_rng(config.audit_seed) if config.audit else None)
        self.cache: PrefixCache = RadixCache(config.page_size) if config.cache == "radix" else NaiveCache()
        self._table = table
        self._counters = counters
        self._page_size = config.page_size
        self._prefixes: list[Any] = [self.cache.root] * config.max_running
        """Handle of the cached prefix that each row has locked."""
        # A row is detached once the cache holds the continuation of its prefix in other pages than the row's:
        # to lock those too could take more pages than a request may hold, so it keeps its own until it ends.
        self._detached: NDArray[np.bool_] = np.zeros(config.max_running, np.bool_)

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones of prefixes that are not locked."""
        return self.pool.free + self.cache.evictable_pages

    def lock_prefix(self, request: Request) -> tuple[Any, IntArray]:
        """Handle and pages of the longest cached prefix of a request. Pass the handle to `attach` or `unlock`."""
        prefix, pages = self.cache.match(request.cacheable_tokens, request.cache_salt)
        self.cache.lock(prefix)
        return prefix, pages

    def unlock(self, prefix: Any) -> None:
        self.cache.unlock(prefix)

    def attach(self, slot: int, prefix: Any) -> None:
        """Give a locked prefix to the row that begins with it."""
        self._prefixes[slot] = prefix
        self._detached[slot] = False

    def allocate(self, count: int) -> IntArray:
        """`count` ≤ `available` pages for a row."""
        missing = count - self.pool.free
        if missing > 0:
            self._evict(missing)
        return self.pool.allocate(count)

    def flush(self) -> int:
        """Forget every cached prefix that is not locked. Returns the number of pages freed."""
        return self._evict(self.cache.evictable_pages)

    def reclaimable(self, slot: int) -> int:
        """Least number of pages that become available when the row is released."""
        own = int(np.count_nonzero(self.pool.owner[self._table.pages(slot)] == Owner.ROW))
        return own + self.cache.pages_freed_by_unlock(self._prefixes[slot])

    def share(self, slot: int) -> None:
        """Insert the row's new full pages into the cache; the row continues to read them, locked."""
        table, page = self._table, self._page_size
        seen, full = int(table.inserted[slot]), int(table.computed[slot]) // page
        if full == seen or self._detached[slot]:
            return
        prefix = self._prefixes[slot]
        tokens = table.tokens[slot, seen * page : full * page]
        if self.cache.has_continuation(prefix, tokens):
            self._detached[slot] = True
            return
        pages = table.page_table[slot, seen:full]
        longer, known = self.cache.insert(prefix, tokens, pages)
        assert known == 0
        self.pool.transfer_to_cache(pages)
        self.cache.lock(longer)
        self.cache.unlock(prefix)
        self._prefixes[slot] = longer
        table.inserted[slot] = full

    def release(self, slot: int, *, damaged: bool) -> None:
        """Free the pages of a settled row; the cache takes what the row has computed.

        `damaged`: the row's logits were not finite, so its pages must not be found again, the prompt's included.
        """
        table, page = self._table, self._page_size
        prefix, self._prefixes[slot] = self._prefixes[slot], self.cache.root
        if not damaged:
            seen = int(table.inserted[slot])
            full = min(int(table.computed[slot]), int(table.length[slot])) // page
            if full > seen:
                new = table.page_table[slot, seen:full]
                _, known = self.cache.insert(prefix, table.tokens[slot, seen * page : full * page], new)
                self.pool.transfer_to_cache(new[known:])
        self.cache.unlock(prefix)
        if damaged:
            self.pool.release(self.cache.discard(prefix))
        pages = table.pages(slot)
        self.pool.release(pages[self.pool.owner[pages] == Owner.ROW])

    def _evict(self, count: int) -> int:
        pages = self.cache.evict(count)
        self.pool.release(pages)
        self._counters.evicted_pages += len(pages)
        return len(pages)
