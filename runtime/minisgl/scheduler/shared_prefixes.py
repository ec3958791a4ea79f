"""Which rows of a decode step share the beginning of their context, and whether an engine should care.

A row's pages before the one that its input token is written to are full and never written again, so rows with the
same leading pages can have them read once for all of them (cascade attention, Juravsky et al., arXiv:2402.05099).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import EMPTY, IntArray
from minisgl.wire.shared_prefixes import SharedPrefix, encode_prefixes

SMALLEST_GROUP: Final = 16
"""Rows. The kernel multiplies tiles of many rows with the shared keys; in a smaller group most of a tile is empty."""
LEAST_SAVED_TOKENS: Final = 32_768
"""To read so many tokens takes about as long as the second kernel that a cascade costs in every layer."""
LEAST_SAVED_SHARE: Final = 0.4
"""Of all tokens that the rows attend to. Below it the plain kernel, which finds what rows share in the L2 cache as
long as they run side by side, is about as fast."""
LONGEST_OWN: Final = 4096
"""Tokens behind the prefix: one program reads all of them for a row and a head, however many they are."""
RECHECK_STEPS: Final = 256
"""Rows grow by a token a step: whether the groups pay is asked again after so many steps."""

_LEVELS: Final = 4
"""Groups are looked for within groups (those who share instructions, of them those who share a document, …) so many
times, which bounds the time it takes whatever clients send."""


def find_shared_prefixes(
    page_table: IntArray, slots: IntArray, full_pages: IntArray, smallest: int
) -> list[SharedPrefix]:
    """Disjoint groups of at least `smallest` of the rows `slots` [D] that save most reads of pages.

    `page_table` [all slots, columns]; `full_pages` [D] how many of a row's leading pages nobody writes any more.
    """
    rows = np.flatnonzero(full_pages).astype(np.int32)
    return _best_within(_Rows(page_table, slots, full_pages, smallest), rows, 0, _LEVELS)[1]


def is_worthwhile(groups: list[SharedPrefix], lengths: IntArray, page_size: int) -> bool:
    """Whether an engine gains by reading the groups' pages once. `lengths` [D] tokens that the rows attend to."""
    saved = page_size * sum(group.pages * (len(group.rows) - 1) for group in groups)
    if saved < LEAST_SAVED_TOKENS or saved < LEAST_SAVED_SHARE * int(lengths.sum()):
        return False
    own = lengths.copy()
    for group in groups:
        own[group.rows] -= group.pages * page_size
    return int(own.max()) <= LONGEST_OWN


class SharedPrefixes:
    """The groups of the present decode batch. They hold until its rows change: a row's leading pages do not."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._slots: IntArray = EMPTY
        self._encoded: IntArray = EMPTY
        self._steps_left = 0

    def for_step(self, page_table: IntArray, slots: IntArray, positions: IntArray) -> IntArray:
        """`StepPlan.shared_prefixes` of a step that decodes `slots` [D] at `positions` [D]; empty when there is
        nothing to share, or too little. Called for every plan: a slot changes hands only while it is not in one."""
        self._steps_left -= 1
        same = slots is self._slots or np.array_equal(slots, self._slots)
        if self._steps_left < 0 or not same:
            self._slots, self._steps_left = slots, RECHECK_STEPS
            groups = find_shared_prefixes(page_table, slots, positions // self._page_size, SMALLEST_GROUP)
            self._encoded = encode_prefixes(groups if is_worthwhile(groups, positions + 1, self._page_size) else [])
        return self._encoded


class _Rows(NamedTuple):
    page_table: IntArray
    slots: IntArray
    full_pages: IntArray
    smallest: int


def _best(batch: _Rows, rows: IntArray, known: int, levels: int) -> tuple[int, list[SharedPrefix]]:
    """Of `rows`, which share the first `known` ≥ 1 pages: the page reads saved, and the groups that save them."""
    limit = int(batch.full_pages[rows].min())
    ahead = batch.page_table[batch.slots[rows], known:limit]
    differs: NDArray[np.bool_] = (ahead != ahead[0]).any(axis=0)
    shared = known + int(differs.argmax()) if differs.any() else limit
    saved = (len(rows) - 1) * shared
    saved_within, groups_within = _best_within(batch, rows[batch.full_pages[rows] > shared], shared, levels)
    return (saved_within, groups_within) if saved_within > saved else (saved, [SharedPrefix(shared, rows)])


def _best_within(batch: _Rows, rows: IntArray, column: int, levels: int) -> tuple[int, list[SharedPrefix]]:
    """The same of those of `rows` that share the page in `column` with enough others."""
    saved = 0
    groups: list[SharedPrefix] = []
    if levels and len(rows) >= batch.smallest:
        pages = batch.page_table[batch.slots[rows], column]
        order = pages.argsort(kind="stable")
        ends = np.append(np.flatnonzero(np.diff(pages[order])) + 1, len(rows))
        sizes = np.diff(ends, prepend=0)
        large = sizes >= batch.smallest
        for end, size in zip(ends[large].tolist(), sizes[large].tolist(), strict=True):
            more, found = _best(batch, rows[order[end - size : end]], column + 1, levels - 1)
            saved += more
            groups += found
    return saved, groups
