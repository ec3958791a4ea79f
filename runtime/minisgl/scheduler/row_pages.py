"""KV pages of the rows: allocated from the pool, shared through the prefix cache, and freed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.kv_layout import row_pages
from minisgl.scheduler.checkpoints import Checkpoints
from minisgl.scheduler.pages import NO_PAGES, UNLIMITED, Owner, PagePool, Room
from minisgl.scheduler.prefix_cache import NaiveCache, PrefixCache
from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.request import Phase, Request, RequestTable
from minisgl.scheduler.row_states import RowStates
from minisgl.scheduler.window_pages import ABSENT, NO_REFERENCES, WindowPages
from minisgl.wire.messages import Counters
from minisgl.wire.plan import IntArray


class LockedPrefix(NamedTuple):
    """A cached prefix that is kept for a request."""

    handle: Any
    pages: IntArray
    windows: IntArray
    """The last of its pages in layers with a window."""
    matched: int
    """Number of pages that the cache has of the request's tokens: more than `pages` where states are missing."""


class RowPages:
    """The page pool and the prefix cache, and which cached prefix each row has locked."""

    def __init__(self, config: SchedulerConfig, table: RequestTable, counters: Counters) -> None:
        """Raises ValueError for a pool that cannot hold one request."""
        _check_sizes(config)
        self.pool = PagePool(config.num_pages, np.random.default_rng(config.audit_seed) if config.audit else None)
        self.windows = None if config.window is None else WindowPages(config)
        """Pages of layers with a window; None: they are those of all layers."""
        radix = None
        if config.cache == "radix":
            count = config.state_checkpoints
            checkpoints = None
            if count is not None:
                rows, per_row = config.max_running, config.checkpoints_per_row
                checkpoints = Checkpoints(count, audit=config.audit, rows=rows, per_row=per_row)
            radix = RadixCache(config.page_size, self.windows, checkpoints)
        self.cache: PrefixCache = NaiveCache() if radix is None else radix
        self.states = None if config.state_checkpoints is None else RowStates(config, table, radix)
        """Recurrent states of rows; None: no layer has one."""
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

    @property
    def room(self) -> Room:
        """The same, with those of layers with a window."""
        return Room(self.available, UNLIMITED if self.windows is None else self.windows.available)

    @property
    def used(self) -> int:
        """Pages of which rows hold some layers: as a share of all, those of the layers that have fewer left."""
        used, windows = len(self.pool.owner) - self.available, self.windows
        if windows is None:
            return used
        total = len(windows.pool.owner)
        return max(used, len(self.pool.owner) * (total - windows.available) // total)

    @property
    def used_state_checkpoints(self) -> int:
        """Checkpoints of recurrent states that a row or a cached prefix has."""
        return 0 if self.states is None else self.states.used_checkpoints

    def lock_prefix(self, request: Request) -> LockedPrefix:
        """Lock the longest cached prefix of a request, which it can continue. Pass it to `attach` or `unlock`."""
        tokens, salt, windows = request.cacheable_tokens, request.cache_salt, self.windows
        handle, pages = self.cache.match(tokens, salt)
        matched, read = len(pages), NO_PAGES
        if self.states is not None:
            handle, usable = self.cache.resumable(handle)
            pages = pages[:usable]
        if windows is not None and len(pages):
            references = self.cache.windows(handle)
            usable = windows.num_usable(references)
            if usable < len(pages):
                handle, pages = self.cache.match(tokens[: usable * self._page_size], salt)
            read = windows.read(references[:usable])
        self.cache.lock(handle)
        return LockedPrefix(handle, pages, read, matched)

    def unlock(self, prefix: LockedPrefix) -> None:
        if self.windows is not None:
            self.windows.unread(prefix.windows)
        self.cache.unlock(prefix.handle)

    def awaits_state(self, request: Request, prefix: LockedPrefix) -> bool:
        """Whether the plan that is made now saves a state with which the request could begin further behind its
        locked prefix, in the next plan."""
        if self.states is None:
            return False
        lengths = range(len(prefix.pages) * self._page_size + 1, prefix.matched * self._page_size + 1)
        return self.states.will_save(request, lengths)

    def next_row(self) -> int | None:
        """The row for the next request, of those that are not in use; None: any."""
        return None if self.states is None else self.states.next_row()

    def attach(self, slot: int, prefix: LockedPrefix) -> None:
        """Give a locked prefix to the row that begins with it."""
        self._prefixes[slot] = prefix.handle
        self._detached[slot] = False
        if self.windows is not None:
            self.windows.attach(slot, prefix.windows, len(prefix.pages))
        if self.states is not None:
            self.states.attach(slot, prefix.handle, len(prefix.pages), prefix.matched)

    def allocate(self, count: int) -> IntArray:
        """`count` ≤ `available` pages for a row."""
        missing = count - self.pool.free
        if missing > 0:
            self._evict(missing)
        return self.pool.allocate(count)

    def prompt_tokens(self, slot: int, wanted: int) -> int:
        """Up to `wanted` further tokens of a row's prompt, for which there are pages in layers with a window: half of
        those that rows in decode do not need soon, as the next step is launched before the pages of this one are
        released."""
        windows = self.windows
        if windows is None:
            return wanted
        grows = (self._table.phase == Phase.DECODE) & (self._table.computed + 2 >= windows.end * self._page_size)
        spare = windows.available - int(np.count_nonzero(grows))
        end = int(windows.end[slot]) + max(-(-spare // 2), 0)
        return min(wanted, end * self._page_size - int(self._table.computed[slot]))

    def extend(self, slot: int, start: int, length: int) -> None:
        """Let the next plan compute `length` tokens of a row's prompt from `start` on: give it pages of layers with a
        window for them, and checkpoints of its states."""
        if self.windows is not None:
            self.windows.extend(slot, -(-(start + length) // self._page_size))
        if self.states is not None:
            self.states.extend(slot, start, length)

    def take_changes(self, joining: Iterable[Request]) -> dict[str, IntArray]:
        """Fields of the `StepPlan` that is complete now about layers with a window or a recurrent state. `joining`:
        requests whose rows the engine does not know."""
        fields: dict[str, IntArray] = {}
        if (windows := self.windows) is not None:
            slots = [request.slot for request in joining if request.slot is not None]
            fields |= {"window_updates": windows.take_updates(slots), "poison_window_pages": windows.pool.take_freed()}
        if self.states is not None:
            fields["state_changes"] = self.states.take_changes()
        return fields

    def release_behind(self, slots: IntArray, ends: IntArray) -> None:
        """Release pages behind the windows of `slots` [R], whose first `ends` [R] tokens are computed by steps that
        have ended."""
        assert self.windows is not None
        self.windows.release_behind(slots, ends, self._table.prompt_length.take(slots))

    def flush(self) -> int:
        """Forget every cached prefix that is not locked. Returns the number of pages freed."""
        freed = self._evict(self.cache.evictable_pages)
        if self.windows is not None:
            self.windows.flush()
        return freed

    def reclaimable(self, slots: Iterable[int]) -> Room:
        """Least numbers of pages that become available when these rows are released."""
        slots = list(slots)
        return Room(
            sum(map(self._reclaimable, slots)),
            0 if self.windows is None else sum(map(self.windows.reclaimable, slots)),
        )

    def _reclaimable(self, slot: int) -> int:
        own = int(np.count_nonzero(self.pool.owner[self._table.pages(slot)] == Owner.ROW))
        return own + self.cache.pages_freed_by_unlock(self._prefixes[slot])

    def share(self, slot: int) -> None:
        """Insert the row's new full pages into the cache; the row continues to read them, locked."""
        table, page = self._table, self._page_size
        seen, full = int(table.inserted[slot]), int(table.computed[slot]) // page
        if full == seen:
            return
        prefix = self._prefixes[slot]
        tokens = table.tokens[slot, seen * page : full * page]
        if self._detached[slot] or self.cache.has_continuation(prefix, tokens):
            self._detached[slot] = True
            self._share_windows(slot, prefix, seen, full)
            return
        pages = table.page_table[slot, seen:full]
        windows = NO_REFERENCES if self.windows is None else self.windows.offered(slot, seen, full)
        longer, known = self.cache.insert(prefix, tokens, pages, windows)
        assert known == 0
        self.pool.transfer_to_cache(pages)
        if self.windows is not None:
            self.windows.cache(windows)
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
                self._share_windows(slot, prefix, seen, full)
                new = table.page_table[slot, seen:full]
                windows = NO_REFERENCES if self.windows is None else self.windows.offered(slot, seen, full)
                _, known = self.cache.insert(prefix, table.tokens[slot, seen * page : full * page], new, windows)
                self.pool.transfer_to_cache(new[known:])
                if self.windows is not None:
                    self.windows.cache(windows[known:])
        if self.windows is not None:
            self.windows.release(slot, keep=not damaged)
        if self.states is not None:
            self.states.release(slot, damaged=damaged)
        self.cache.unlock(prefix)
        if damaged:
            self.pool.release(self.cache.discard(prefix))
            if self.windows is not None and self._detached[slot]:
                # The cache may have taken pages of the row behind a prefix that the row has not locked.
                tokens, salt = table.tokens[slot, : table.computed[slot]], table.request(slot).cache_salt
                self.pool.release(self.cache.discard(self.cache.match(tokens, salt)[0]))
        pages = table.pages(slot)
        self.pool.release(pages[self.pool.owner[pages] == Owner.ROW])

    def _share_windows(self, slot: int, prefix: Any, begin: int, end: int) -> None:
        """Give the cache a row's pages of layers with a window behind its `prefix`, from index `begin` to `end`, where
        it has only the others: a prefix that could not be used for their lack can be used from now on."""
        windows, page = self.windows, self._page_size
        if windows is None:
            return
        tokens, offered = self._table.tokens[slot, begin * page : end * page], windows.offered(slot, begin, end)
        taken, known = self.cache.fill_windows(prefix, tokens, offered)
        offered[~taken] = ABSENT
        if known < end - begin:
            # Prompts part here.
            needed = max(windows.first_needed((begin + known) * page) - begin, 0)
            windows.cache(offered[needed:], keep=True)
            offered = offered[:needed]
        windows.cache(offered)

    def _evict(self, count: int) -> int:
        pages = self.cache.evict(count)
        self.pool.release(pages)
        self._counters.evicted_pages += len(pages)
        return len(pages)


def _check_sizes(config: SchedulerConfig) -> None:
    page = config.page_size
    if config.num_pages * page < config.max_model_len:
        raise ValueError(
            f"{config.num_pages} pages of {page} tokens cannot hold one request of max_model_len "
            f"{config.max_model_len}; lower max_model_len or give the pool more memory"
        )
    if config.window is not None:
        most = min(-(-config.max_model_len // page), row_pages(config.window, page) + 2)
        if config.num_window_pages < most:
            raise ValueError(
                f"{config.num_window_pages} pages for layers with a window of {config.window} tokens cannot hold "
                f"the {most} of one request; give the pool more memory"
            )
