"""Interface of prefix caches, and the cache that keeps nothing."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.pages import NO_PAGES
from minisgl.scheduler.window_pages import NO_REFERENCES, References
from minisgl.wire.plan import IntArray


class PrefixCache(Protocol):
    """Map from token prefixes to KV pages, whole pages only. A handle stands for a cached prefix, the root handle for
    the empty one. Pages of a locked prefix stay; pages of unlocked prefixes can be evicted."""

    @property
    def root(self) -> Any:
        """Handle of the empty prefix."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` can return now."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of pages in the cache, locked or not."""
        ...

    def match(self, tokens: IntArray, salt: bytes = b"") -> tuple[Any, IntArray]:
        """Handle and pages of the longest prefix of `tokens` that is cached under this `salt`. The caller locks it
        before any other call changes the cache."""
        ...

    def resumable(self, handle: Any) -> tuple[Any, int]:
        """Longest prefix of `handle` with a checkpoint of recurrent states, or the empty one, and its number of
        pages."""
        ...

    def lock(self, handle: Any) -> None:
        """Keep the pages of the prefix `handle` until as many calls of `unlock`."""
        ...

    def unlock(self, handle: Any) -> None:
        """Undo one `lock`."""
        ...

    def pages_freed_by_unlock(self, handle: Any) -> int:
        """Number of pages that become evictable when the prefix `handle` is unlocked once."""
        ...

    def has_continuation(self, handle: Any, tokens: IntArray) -> bool:
        """True when the cache does not need the first page of `tokens` behind the prefix `handle`: it has one already,
        or keeps none."""
        ...

    def windows(self, handle: Any) -> References:
        """References to pages of layers with a window, one for each page of the prefix `handle`."""
        ...

    def fill_windows(self, handle: Any, tokens: IntArray, windows: References) -> tuple[NDArray[np.bool_], int]:
        """Take `windows` [N] where the cache has the page of `tokens` behind the prefix `handle`, but not that of
        layers with a window. Returns which it took, and how many pages it has."""
        ...

    def insert(
        self, handle: Any, tokens: IntArray, pages: IntArray, windows: References = NO_REFERENCES
    ) -> tuple[Any, int]:
        """Extend the prefix `handle` by whole pages of `tokens`, whose KV is in `pages` and, in layers with a window,
        in `windows`.

        Returns the handle of the extended prefix and the number of leading pages of the extension that the cache
        already had: the caller keeps these of `pages`, and the cache owns the others from now on.
        """
        ...

    def evict(self, count: int) -> IntArray:
        """Remove and return `min(count, evictable_pages)` pages, the least recently used first."""
        ...

    def discard(self, handle: Any) -> IntArray:
        """Remove and return the unlocked pages of the prefix `handle` and all pages cached behind them."""
        ...


class NaiveCache:
    """Cache without entries: every request computes its own prompt."""

    root = None
    evictable_pages = 0
    num_pages = 0

    def match(self, tokens: IntArray, salt: bytes = b"") -> tuple[None, IntArray]:
        return None, NO_PAGES

    def resumable(self, handle: None) -> tuple[None, int]:
        return None, 0

    def lock(self, handle: None) -> None:
        pass

    def unlock(self, handle: None) -> None:
        pass

    def pages_freed_by_unlock(self, handle: None) -> int:
        return 0

    def has_continuation(self, handle: None, tokens: IntArray) -> bool:
        return True

    def windows(self, handle: None) -> References:
        return NO_REFERENCES

    def fill_windows(self, handle: None, tokens: IntArray, windows: References) -> tuple[NDArray[np.bool_], int]:
        return np.zeros(len(windows), np.bool_), 0

    def insert(
        self, handle: None, tokens: IntArray, pages: IntArray, windows: References = NO_REFERENCES
    ) -> tuple[None, int]:
        return None, len(pages)

    def evict(self, count: int) -> IntArray:
        return NO_PAGES

    def discard(self, handle: None) -> IntArray:
        return NO_PAGES
