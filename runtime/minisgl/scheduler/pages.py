"""Ownership of the pages of the KV pool."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import IntArray

NO_PAGES: Final[IntArray] = np.empty(0, np.int32)


class Room(NamedTuple):
    """Numbers of pages: of layers that attend to all tokens, and of those with a window. Where all layers have the same
    pages, the second number is 0 in what is needed and UNLIMITED in what there is."""

    full: int
    window: int

    def plus(self, other: Room) -> Room:
        return Room(self.full + other.full, self.window + other.window)

    def holds(self, needed: Room) -> bool:
        return needed.full <= self.full and needed.window <= self.window

    @property
    def rows(self) -> int:
        """Number of rows that can get a page more."""
        return min(self.full, self.window)


UNLIMITED: Final = 1 << 40


class Owner:
    """Owner of a page; every page has exactly one. Plain ints, since every step compares them with whole columns."""

    FREE: Final = 0
    ROW: Final = 1
    """One request; no other request reads the page."""
    CACHE: Final = 2
    """The prefix cache: requests that have locked the page read it, and no request writes it."""


class PagePool:
    """A stack of free pages, and the owner of every page."""

    def __init__(self, num_pages: int, shuffle: np.random.Generator | None = None) -> None:
        """`shuffle`: allocate free pages in random order and keep a list of the freed ones, for audits."""
        self.owner: NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        # The lowest page is on top, so that a new pool allocates 0, 1, 2, …
        self._stack: IntArray = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages
        self._shuffle = shuffle
        self._freed: list[IntArray] = []

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._free

    def allocate(self, count: int) -> IntArray:
        """`count` ≤ `free` pages for a row."""
        assert count <= self._free, "allocation must be planned against `free`"
        if self._shuffle is not None:
            self._shuffle.shuffle(self._stack[: self._free])
        self._free -= count
        pages = self._stack[self._free : self._free + count][::-1].copy()
        self.owner[pages] = Owner.ROW
        return pages

    def transfer_to_cache(self, pages: IntArray) -> None:
        """Make the prefix cache the owner of `pages`, which a row owned."""
        assert (self.owner[pages] == Owner.ROW).all(), "the cache can only take pages that a row owns"
        self.owner[pages] = Owner.CACHE

    def release(self, pages: IntArray) -> None:
        """Free `pages`; no launched step may still write them."""
        assert (self.owner[pages] != Owner.FREE).all(), "a page is freed twice"
        self.owner[pages] = Owner.FREE
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)
        if self._shuffle is not None:
            self._freed.append(pages)

    def take_freed(self) -> IntArray:
        """Pages that were freed since the last call, even if allocated again; empty unless auditing."""
        if not self._freed:
            return NO_PAGES
        freed = np.unique(np.concatenate(self._freed))
        self._freed.clear()
        return freed
