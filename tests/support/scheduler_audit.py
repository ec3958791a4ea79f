"""Consistency checks of the scheduler's state, for tests and audits."""

from __future__ import annotations

import numpy as np

from minisgl.scheduler.checkpoints import NO_CHECKPOINT
from minisgl.scheduler.pages import Owner
from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.request import Phase
from minisgl.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Check that pages, locks and rows have exactly one owner. Raises AssertionError."""
    pool, table, page = scheduler.pages.pool, scheduler.table, scheduler.config.page_size
    rows = np.flatnonzero(table.phase != Phase.EMPTY).tolist()

    free = pool._stack[: pool.free]
    assert len(np.unique(free)) == len(free), "a page is free twice"
    assert (pool.owner[free] == Owner.FREE).all()
    assert np.count_nonzero(pool.owner == Owner.FREE) == len(free), "a page is lost"

    if scheduler.pages.windows is not None:
        check_windows(scheduler, rows)
    if scheduler.pages.states is not None:
        check_states(scheduler, rows)
    cached: set[int] = set()
    if isinstance(scheduler.pages.cache, RadixCache):
        cached = check_radix(scheduler.pages.cache)
    assert cached == set(np.flatnonzero(pool.owner == Owner.CACHE).tolist()), "cache and pool disagree"

    own: list[int] = []
    for slot in rows:
        pages = table.pages(slot)
        assert (pool.owner[pages] != Owner.FREE).all(), f"row {slot} holds a free page"
        own += pages[pool.owner[pages] == Owner.ROW].tolist()
        assert table.num_pages[slot] * page >= table.computed[slot], f"row {slot} writes outside of its pages"
        assert table.in_flight[slot] >= 0
        assert table.drafts_in_flight[slot] >= 0
        assert table.in_flight[slot] or not table.drafts_in_flight[slot], "drafts of no step are in flight"
        if table.phase[slot] == Phase.DECODE:
            ahead = table.computed[slot] - (table.length[slot] - 1)
            assert 0 <= ahead <= table.in_flight[slot], "more tokens are under way than steps"
    assert len(own) == len(set(own)), "a page is in two rows' hands"
    assert sorted(own) == np.flatnonzero(pool.owner == Owner.ROW).tolist(), "a row's page was not given back"

    assert table.num_in_use == len(rows)
    assert table.num_constrained == np.count_nonzero(table.constrained)
    assert sorted(table._free_rows) == np.flatnonzero(table.phase == Phase.EMPTY).tolist(), (
        "a row is lost or free twice"
    )
    alive = [r for r in table.requests if r is not None and table.phase[r.slot] != Phase.ENDING]
    assert len(alive) + scheduler.num_waiting == len(scheduler._unfinished)


def check_windows(scheduler: Scheduler, rows: list[int]) -> None:
    """Check the pages of layers with a window: each is free, a row's, or in the cache, with its number of readers."""
    windows, table, page = scheduler.pages.windows, scheduler.table, scheduler.config.page_size
    assert windows is not None
    pool = windows.pool
    free = pool._stack[: pool.free]
    assert len(np.unique(free)) == len(free), "a page is free twice"
    assert set(free.tolist()) == set(np.flatnonzero(pool.owner == Owner.FREE).tolist()), "a page is lost"
    cached: list[int] = []
    if isinstance(scheduler.pages.cache, RadixCache):
        for node in scheduler.pages.cache.nodes():
            assert len(node.windows) == len(node.pages)
            cached += (node.windows[windows.is_present(node.windows)] & ((1 << 24) - 1)).tolist()
    assert len(cached) == len(set(cached)), "a page is cached twice"
    assert set(cached) == set(np.flatnonzero(pool.owner == Owner.CACHE).tolist()), "cache and pool disagree"
    own: list[int] = []
    readers = np.zeros(len(pool.owner), np.int32)
    for slot in range(scheduler.config.max_running):
        held = windows._pages(slot)
        assert slot in rows or not len(held), "a row that is not in use holds pages"
        assert windows.end[slot] <= table.num_pages[slot], "a row has more pages of these layers than of others"
        assert windows.end[slot] * page >= table.computed[slot] or slot not in rows, f"row {slot} writes outside"
        assert (pool.owner[held] != Owner.FREE).all(), f"row {slot} holds a free page"
        own += held[pool.owner[held] == Owner.ROW].tolist()
        readers[held[pool.owner[held] == Owner.CACHE]] += 1
        if table.phase[slot] == Phase.DECODE and not table.in_flight[slot]:
            assert len(held) <= windows.row_pages, f"row {slot} holds pages behind its window"
    assert len(own) == len(set(own)), "a page is in two rows' hands"
    assert sorted(own) == np.flatnonzero(pool.owner == Owner.ROW).tolist(), "a row's page was not given back"
    assert (readers == windows._readers).all(), "readers are not counted"
    idle = [number for number in cached if not readers[number]]
    assert windows.evictable == len(idle)
    queued = {entry for queue in windows._queues for entry in queue}
    assert all((number, int(windows._since[number])) in queued for number in idle), "a page was forgotten"


def check_states(scheduler: Scheduler, rows: list[int]) -> None:
    """Check the checkpoints of recurrent states: each is free, a row's, or of one cached prefix, in whole blocks."""
    states, cache = scheduler.pages.states, scheduler.pages.cache
    assert states is not None
    if not isinstance(cache, RadixCache):
        return
    checkpoints = cache.checkpoints
    assert checkpoints is not None
    cached = {node.checkpoint: node for node in cache.nodes() if node.checkpoint != NO_CHECKPOINT}
    assert cached == {number: kept.prefix for number, kept in checkpoints._kept.items()}, "cache and pool disagree"
    assert all(cache.resumable(node)[1] * cache.page_size % states.block == 0 for node in cached.values())
    held = []
    for slot, row in enumerate(states._rows):
        own = [*row.saved.values(), *([row.answer] if row.answer != NO_CHECKPOINT else [])]
        assert slot in rows or not own, "a row that is not in use holds checkpoints"
        held += own
    assert sorted(held) == sorted(checkpoints._taken), "rows and pool disagree"
    every = sorted([*checkpoints._free, *cached, *held, *checkpoints._spare])
    unused = [
        checkpoint
        for slot in range(scheduler.config.max_running)
        if slot not in rows
        for checkpoint in checkpoints.at_row(slot)
    ]
    expected = [*unused, *range(scheduler.config.state_checkpoints or 0)]
    assert every == expected, "a checkpoint is lost or has two owners"


def check_radix(cache: RadixCache) -> set[int]:
    """Check the invariants of the tree and return its pages."""
    pages: list[int] = []
    evictable = 0
    assert all(root.locks or root.children for root in cache.salted.values()), "a salt was not forgotten"
    for node in cache.nodes():
        assert node.parent is not None
        assert len(node.tokens) == len(node.pages) * cache.page_size > 0
        assert node.parent.children[node.tokens[: cache.page_size].tobytes()] is node
        assert node.locks >= sum(child.locks for child in node.children.values()) >= 0
        pages += node.pages.tolist()
        evictable += len(node.pages) if node.locks == 0 else 0
        if node.locks == 0 and not node.children:
            assert any(entry[2] is node and entry[0] == node.last_used for entry in cache._heap), "a leaf was forgotten"
    assert len(pages) == len(set(pages)) == cache.num_pages, "a page is cached twice"
    assert evictable == cache.evictable_pages
    return set(pages)
