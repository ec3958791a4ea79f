"""Each page has one owner, and counts stay exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.scheduler.pages import Owner, PagePool


def test_a_new_pool_allocates_pages_in_order() -> None:
    pool = PagePool(5)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.free == 2


def test_freeing_a_page_twice_is_an_error() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(pages)


def test_only_a_page_of_a_row_can_move_to_the_cache() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.transfer_to_cache(pages)
    with pytest.raises(AssertionError):
        pool.transfer_to_cache(pages)
    pool.release(pages)
    assert pool.free == 4


def test_audit_lists_freed_pages_once_and_shuffles_allocated_ones() -> None:
    pool = PagePool(64, np.random.default_rng(0))
    pages = pool.allocate(64)
    assert sorted(pages.tolist()) == list(range(64))
    assert pages.tolist() != list(range(64))
    pool.release(pages[:3])
    assert pool.take_freed().tolist() == sorted(pages[:3].tolist())
    assert len(pool.take_freed()) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.booleans())
def test_no_page_is_lost_or_has_two_owners(operations: list[tuple[bool, int]], shuffled: bool) -> None:
    pool = PagePool(24, np.random.default_rng(1) if shuffled else None)
    held: list[np.ndarray] = []
    for allocate, size in operations:
        if allocate and size <= pool.free:
            held.append(pool.allocate(size))
        elif held:
            pool.release(held.pop(size % len(held)))
        in_hands = np.concatenate(held) if held else np.empty(0, np.int32)
        assert len(set(in_hands.tolist())) == len(in_hands) == 24 - pool.free
        assert (pool.owner[in_hands] == Owner.ROW).all()
