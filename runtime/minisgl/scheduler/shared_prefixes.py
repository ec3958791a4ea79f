"""Groups of decode rows that share the beginning of their context, where an engine gains by reading it once.

The pages of a row before the one that its input token is written to are full and never written again. An engine can
therefore read the common leading pages of several rows once (cascade attention, Juravsky et al., arXiv:2402.05099).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import EMPTY, IntArray
from minisgl.wire.shared_prefixes import SharedPrefix, encode_prefixes

MIN_GROUP_ROWS: Final = 16
"""Rows of the smallest group. The kernel multiplies tiles of many rows with the shared keys; in a smaller group most
of a tile is empty."""
MIN_SAVED_TOKENS: Final = 32_768
"""Reading this number of tokens takes about as long as the second kernel that a cascade needs in every layer."""
MIN_SAVED_SHARE: Final = 0.4
"""Share of all tokens that the rows attend to. Below it the plain kernel is about as fast: it finds shared tokens in
the L2 cache as long as the rows run side by side."""
MAX_SUFFIX_TOKENS: Final = 4096
"""Tokens of a row behind the prefix: one program reads all of them for a row and a head."""
RECHECK_STEPS: Final = 256
"""Steps after which the groups are evaluated again, since rows grow by one token per step."""

_LEVELS: Final = 4
"""Depth of the search for groups within groups (rows that share instructions, among them rows that share a document,
…); it bounds the time of the search for any input."""


def find_shared_prefixes(
    page_table: IntArray, slots: IntArray, full_pages: IntArray, smallest: int
) -> list[SharedPrefix]:
    """Disjoint groups of at least `smallest` of the rows `slots` [D] that save the most page reads.

    `page_table` [all slots, columns]; `full_pages` [D] is the number of leading pages of a row that are never written
    again.
    """
    rows = np.flatnonzero(full_pages).astype(np.int32)
    return _best_groups_within(_Rows(page_table, slots, full_pages, smallest), rows, 0, _LEVELS)[1]


def is_worthwhile(groups: list[SharedPrefix], lengths: IntArray, page_size: int) -> bool:
    """True when an engine gains by reading the pages of the groups once. `lengths` [D]: tokens that each row attends
    to."""
    saved = page_size * sum(group.pages * (len(group.rows) - 1) for group in groups)
    if saved < MIN_SAVED_TOKENS or saved < MIN_SAVED_SHARE * int(lengths.sum()):
        return False
    own = lengths.copy()
    for group in groups:
        own[group.rows] -= group.pages * page_size
    return int(own.max()) <= MAX_SUFFIX_TOKENS


class SharedPrefixes:
    """Groups of the current decode batch. They stay valid until its rows change, since leading pages do not change."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._slots: IntArray = EMPTY
        self._encoded: IntArray = EMPTY
        self._steps_left = 0

    def for_step(self, page_table: IntArray, slots: IntArray, positions: IntArray) -> IntArray:
        """`StepPlan.shared_prefixes` of a step that decodes `slots` [D] at `positions` [D]; empty when the rows share
        nothing or too little. Call it for every plan: a slot is given to another request only between two plans."""
        self._steps_left -= 1
        same = slots is self._slots or np.array_equal(slots, self._slots)
        if self._steps_left < 0 or not same:
            self._slots, self._steps_left = slots, RECHECK_STEPS
            groups = find_shared_prefixes(page_table, slots, positions // self._page_size, MIN_GROUP_ROWS)
            self._encoded = encode_prefixes(groups if is_worthwhile(groups, positions + 1, self._page_size) else [])
        return self._encoded


class _Rows(NamedTuple):
    """Arguments of `find_shared_prefixes`."""

    page_table: IntArray
    slots: IntArray
    full_pages: IntArray
    smallest: int


def _best_groups(batch: _Rows, rows: IntArray, known: int, levels: int) -> tuple[int, list[SharedPrefix]]:
    """Groups of `rows`, which share the first `known` ≥ 1 pages, and the number of page reads that they save."""
    limit = int(batch.full_pages[rows].min())
    ahead = batch.page_table[batch.slots[rows], known:limit]
    differs: NDArray[np.bool_] = (ahead != ahead[0]).any(axis=0)
    shared = known + int(differs.argmax()) if differs.any() else limit
    saved = (len(rows) - 1) * shared
    saved_within, groups_within = _best_groups_within(batch, rows[batch.full_pages[rows] > shared], shared, levels)
    return (saved_within, groups_within) if saved_within > saved else (saved, [SharedPrefix(shared, rows)])


def _best_groups_within(batch: _Rows, rows: IntArray, column: int, levels: int) -> tuple[int, list[SharedPrefix]]:
    """The same for the rows of `rows` that share the page in `column` with enough others."""
    saved = 0
    groups: list[SharedPrefix] = []
    if levels and len(rows) >= batch.smallest:
        pages = batch.page_table[batch.slots[rows], column]
        order = pages.argsort(kind="stable")
        ends = np.append(np.flatnonzero(np.diff(pages[order])) + 1, len(rows))
        sizes = np.diff(ends, prepend=0)
        large = sizes >= batch.smallest
        for end, size in zip(ends[large].tolist(), sizes[large].tolist(), strict=True):
            more, found = _best_groups(batch, rows[order[end - size : end]], column + 1, levels - 1)
            saved += more
            groups += found
    return saved, groups
