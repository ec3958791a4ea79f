"""The radix tree compared with a model that keeps the prefix of every page in a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.scheduler.prefix_cache import NaiveCache
from minisgl.scheduler.radix_cache import Node, RadixCache
from support.scheduler_audit import check_radix


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def insert(cache: RadixCache, tokens: list[int], first_page: int) -> Node:
    pages = np.arange(first_page, first_page + len(tokens) // cache.page_size, dtype=np.int32)
    return cache.insert(cache.root, np.array(tokens, np.int32), pages)[0]


def test_match_is_aligned_down_to_whole_pages() -> None:
    cache = RadixCache(4)
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    assert cache.match(ints(1, 2, 3, 4, 5, 6, 7, 8, 9))[1].tolist() == [10, 11]
    assert cache.match(ints(1, 2, 3, 4, 5, 6, 7))[1].tolist() == [10]
    assert cache.match(ints(1, 2, 3))[1].tolist() == []
    assert cache.match(ints(2, 2, 3, 4))[1].tolist() == []


def test_a_split_keeps_the_handle_of_the_longer_prefix_locked() -> None:
    cache = RadixCache(1)
    long = insert(cache, [1, 2, 3, 4], 0)
    cache.lock(long)
    handle, pages = cache.match(ints(1, 2, 9))
    assert pages.tolist() == [0, 1]
    assert cache.evictable_pages == 0
    assert len(cache.evict(4)) == 0
    cache.unlock(long)
    assert cache.evictable_pages == 4
    assert handle is not long
    check_radix(cache)


def test_insert_returns_the_number_of_known_pages() -> None:
    cache = RadixCache(2)
    insert(cache, [1, 2, 3, 4], 0)
    longer, known = cache.insert(cache.root, ints(1, 2, 3, 4, 5, 6), ints(7, 8, 9))
    assert known == 2
    assert cache.match(ints(1, 2, 3, 4, 5, 6))[1].tolist() == [0, 1, 9]
    assert not cache.has_continuation(longer, ints(5, 6))


def test_eviction_removes_the_requested_number_of_least_recently_used_pages() -> None:
    cache = RadixCache(1)
    old = insert(cache, [1, 2, 3, 4], 0)
    new = insert(cache, [5, 6, 7, 8], 4)
    for node in (old, new):
        cache.lock(node)
    for node in (old, new):
        cache.unlock(node)
    assert sorted(cache.evict(3).tolist()) == [1, 2, 3], "the tail of the older prefix"
    assert cache.match(ints(1, 2, 3))[1].tolist() == [0]
    assert sorted(cache.evict(2).tolist()) == [0, 7]
    assert cache.evictable_pages == cache.num_pages == 3
    check_radix(cache)


def test_unlocking_twice_is_an_error() -> None:
    cache = RadixCache(1)
    node = insert(cache, [1], 0)
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(AssertionError, match="unlocked more often"):
        cache.unlock(node)


def test_the_heap_of_evictable_leaves_stays_small_under_hits() -> None:
    cache = RadixCache(1)
    node = insert(cache, [1, 2, 3], 0)
    for _ in range(5000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._heap) < 200


def test_an_eviction_costs_the_same_with_fifty_thousand_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It visits only the leaves that it evicts, not the tree."""
    cache = RadixCache(1)
    for number in range(50_000):
        insert(cache, [number, number + 1, number + 2], 3 * number)
    looked_at = []
    evictable = RadixCache._evictable
    monkeypatch.setattr(
        RadixCache, "_evictable", lambda self, node, stamp: looked_at.append(node) or evictable(self, node, stamp)
    )
    for _ in range(100):
        looked_at.clear()
        assert len(cache.evict(16)) == 16
        assert len(looked_at) <= 20


def test_the_naive_cache_keeps_nothing() -> None:
    cache = NaiveCache()
    handle, pages = cache.match(ints(1, 2))
    cache.lock(handle)
    assert cache.insert(handle, ints(1, 2), ints(0, 1)) == (None, 2)
    cache.unlock(handle)
    assert len(pages) == len(cache.evict(3)) == cache.num_pages == 0


class RadixMachine(RuleBasedStateMachine):
    """Insert, match, lock, unlock and evict at random. The model: prefix of whole pages → page."""

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.model: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[Node, tuple[int, ...]]] = []
        self.next_page = 0

    @property
    def page(self) -> int:
        return self.cache.page_size

    def known(self, tokens: list[int]) -> list[int]:
        pages = []
        for end in range(self.page, len(tokens) + 1, self.page):
            if tuple(tokens[:end]) not in self.model:
                break
            pages.append(self.model[tuple(tokens[:end])])
        return pages

    @rule(tokens=st.lists(st.integers(0, 2), max_size=16))
    def match(self, tokens: list[int]) -> None:
        _, pages = self.cache.match(np.array(tokens, np.int32))
        assert pages.tolist() == self.known(tokens)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=4, max_size=16), keep_locked=st.booleans())
    def insert(self, tokens: list[int], keep_locked: bool) -> None:
        tokens = tokens[: len(tokens) // self.page * self.page]
        count = len(tokens) // self.page
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        expected = len(self.known(tokens))
        start = self.cache.root
        if self.locked and self.locked[-1][1] == tuple(tokens[: len(self.locked[-1][1])]):
            # Extend a locked prefix, as a row does.
            start, prefix = self.locked[-1]
            done = len(prefix)
            node, known = self.cache.insert(start, np.array(tokens[done:], np.int32), pages[done // self.page :])
            known += done // self.page
        else:
            node, known = self.cache.insert(start, np.array(tokens, np.int32), pages)
        assert known == expected
        for index in range(known, count):
            self.model[tuple(tokens[: (index + 1) * self.page])] = int(pages[index])
        if keep_locked:
            self.cache.lock(node)
            self.locked.append((node, tuple(tokens)))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locked:
            self.cache.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))[0])

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        before = self.cache.evictable_pages
        pages = set(self.cache.evict(count).tolist())
        assert len(pages) == min(count, before)
        gone = {prefix for prefix, page in self.model.items() if page in pages}
        assert len(gone) == len(pages), "an evicted page was in the cache"
        for prefix in gone:
            del self.model[prefix]
        for prefix in self.model:
            parent = prefix[: -self.page]
            assert not parent or parent in self.model, "a prefix was evicted before its continuation"
        for _, prefix in self.locked:
            assert not prefix or prefix in self.model, "a locked prefix was evicted"

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            assert check_radix(self.cache) == set(self.model.values())
            locked = {prefix[:end] for _, prefix in self.locked for end in range(1, len(prefix) + 1)}
            assert self.cache.evictable_pages == len([prefix for prefix in self.model if prefix not in locked])


RadixMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
# Other tests cover the lines; tracing would double the time.
TestRadixMachine = RadixMachine.TestCase
