"""Groups of decode rows that share pages: correct, and used only where they are worthwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.scheduler import shared_prefixes
from minisgl.scheduler.shared_prefixes import SharedPrefixes, find_shared_prefixes, is_worthwhile
from minisgl.wire.shared_prefixes import SharedPrefix, decode_prefixes
from support.scheduling import Harness

COLUMNS = 6


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page table of all slots, the batch's slots, and how many of each row's pages are full. Few different pages, so
    that much is shared, also behind pages that are not."""
    slots = draw(st.lists(st.integers(0, 19), unique=True, max_size=20))
    table = draw(st.lists(st.lists(st.integers(0, 2), min_size=COLUMNS, max_size=COLUMNS), min_size=20, max_size=20))
    full = draw(st.lists(st.integers(0, COLUMNS), min_size=len(slots), max_size=len(slots)))
    return np.array(table, np.int32), np.array(slots, np.int32), np.array(full, np.int32)


def _saved(groups: list[SharedPrefix]) -> int:
    return sum(group.pages * (len(group.rows) - 1) for group in groups)


@given(batches(), st.integers(1, 4))
def test_groups_are_disjoint_and_share_full_pages(
    batch: tuple[np.ndarray, np.ndarray, np.ndarray], smallest: int
) -> None:
    table, slots, full_pages = batch
    groups = find_shared_prefixes(table, slots, full_pages, smallest)
    named = [row for group in groups for row in group.rows.tolist()]
    assert len(named) == len(set(named))
    for group in groups:
        assert len(group.rows) >= smallest and group.pages >= 1
        assert (full_pages[group.rows] >= group.pages).all(), "a member still writes a shared page"
        pages = table[slots[group.rows], : group.pages]
        assert (pages == pages[0]).all()


@given(batches())
def test_groups_save_no_less_than_groups_by_the_first_page(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    table, slots, full_pages = batch
    simple = 0
    for page in range(3):
        rows = np.flatnonzero((table[slots, 0] == page) & (full_pages > 0)) if len(slots) else []
        if len(rows) >= 2:
            pages = table[slots[rows], : full_pages[rows].min()]
            simple += (len(rows) - 1) * int(np.append((pages == pages[0]).all(0), False).argmin())
    assert _saved(find_shared_prefixes(table, slots, full_pages, 2)) >= simple


def test_a_long_prefix_of_some_rows_is_preferred_to_a_short_one_of_all() -> None:
    table = np.array([[9, 1, 2, 3, 40], [9, 5, 6, 7, 41], [9, 1, 2, 3, 42], [9, 5, 6, 7, 43]], np.int32)
    groups = find_shared_prefixes(table, np.arange(4, dtype=np.int32), np.full(4, 5, np.int32), 2)
    assert sorted((group.pages, *group.rows.tolist()) for group in groups) == [(4, 0, 2), (4, 1, 3)]


def test_a_short_row_does_not_cut_the_prefix_of_the_others() -> None:
    table = np.tile(np.arange(COLUMNS, dtype=np.int32), (5, 1))
    [group] = find_shared_prefixes(table, np.arange(5, dtype=np.int32), np.array([6, 6, 1, 6, 6], np.int32), 2)
    assert (group.pages, group.rows.tolist()) == (6, [0, 1, 3, 4])


@pytest.mark.parametrize(
    ("rows", "own", "others", "expected"),
    [
        (256, 200, [], True),
        (16, 200, [], False),
        (33, 200, [], True),
        (256, 200, [4096], True),
        (256, 200, [4097], False),
        (64, 200, [2000] * 80, True),
        (64, 200, [2000] * 110, False),
    ],
    ids=["a large group", "too few tokens", "enough tokens", "a row", "a long row", "many rows", "too many rows"],
)
def test_only_worthwhile_groups_are_used(rows: int, own: int, others: list[int], expected: bool) -> None:
    lengths = np.array([2048 + own] * rows + others, np.int32)
    assert is_worthwhile([SharedPrefix(32, np.arange(rows, dtype=np.int32))], lengths, 64) is expected


def test_groups_are_recomputed_when_the_batch_changes() -> None:
    table = np.zeros((64, 40), np.int32)
    table[:, 32:] = np.arange(64 * 8).reshape(64, 8) + 1
    slots, positions = np.arange(40, dtype=np.int32), np.full(40, 2100, np.int32)
    prefixes = SharedPrefixes(64)
    [first] = decode_prefixes(prefixes.for_step(table, slots, positions), 40)
    assert (first.pages, len(first.rows)) == (32, 40)
    # Slot 7 ends, and is given to another request.
    [second] = decode_prefixes(prefixes.for_step(table, np.delete(slots, 7), np.delete(positions, 7)), 39)
    assert len(second.rows) == 39
    table[7] = 1000
    [third] = decode_prefixes(prefixes.for_step(table, slots, positions), 40)
    assert third.rows.tolist() == [row for row in range(40) if row != 7]
    # One step without rows; then all slots have other requests.
    assert not len(prefixes.for_step(table, slots[:0], positions[:0]))
    table[:, 0] = np.arange(64) + 2000
    assert not len(prefixes.for_step(table, slots, positions))


def test_groups_are_evaluated_again_as_rows_grow() -> None:
    table = np.zeros((64, 400), np.int32)
    table[:, 32:] = np.arange(64 * 368).reshape(64, 368) + 1
    slots, positions = np.arange(40, dtype=np.int32), np.full(40, 2048 + 4000, np.int32)
    positions[1:] = 2100
    prefixes = SharedPrefixes(64)
    used = []
    for _ in range(2 * shared_prefixes.RECHECK_STEPS):
        used.append(len(prefixes.for_step(table, slots, positions)) > 0)
        positions = positions + 1
    assert used[0] and not used[-1]


def test_requests_with_a_common_prompt_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model checks every group of a plan."""
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_TOKENS", 1)
    harness = Harness(rows=20, pages=128, budget=64)
    prompt = list(range(10, 30))
    answers = [harness.submit([*prompt, 50 + number], max_tokens=20, ignore_eos=True) for number in range(24)]
    harness.run()
    assert harness.engine.shared_rows > 100
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()
