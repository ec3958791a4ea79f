"""What the scheduler wants of a prefix cache, and the cache that keeps nothing."""

from __future__ import annotations

from typing import Any, Protocol

from minisgl.scheduler.pages import NO_PAGES
from minisgl.wire.plan import IntArray


class PrefixCache(Protocol):
    """Maps token prefixes to KV pages, whole pages only. A handle names a cached prefix; the root handle names
    the empty one. Pages of a locked prefix stay; those of unlocked ones can be evicted."""

    @property
    def root(self) -> Any: ...

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could give back now."""
        ...

    @property
    def num_pages(self) -> int:
        """All pages in the cache, locked or not."""
        ...

    def match(self, tokens: IntArray, salt: bytes = b"") -> tuple[Any, IntArray]:
        """Handle and pages of the longest prefix of `tokens` that is cached under this `salt`. Locks nothing: the
        caller does, before anything else happens to the cache."""
        ...

    def lock(self, handle: Any) -> None: ...

    def unlock(self, handle: Any) -> None: ...

    def pages_freed_by_unlock(self, handle: Any) -> int:
        """Pages that become evictable when the prefix `handle` is unlocked once."""
        ...

    def has_continuation(self, handle: Any, tokens: IntArray) -> bool:
        """Whether the cache has, or would not want, the first page of `tokens` behind the prefix `handle`."""
        ...

    def insert(self, handle: Any, tokens: IntArray, pages: IntArray) -> tuple[Any, int]:
        """Extend the prefix `handle` by whole pages of `tokens`, whose KV lies in `pages`.

        Returns the handle of the extended prefix and how many leading pages of the extension the cache already
        had: these of `pages` stay the caller's, the others are the cache's from now on.
        """
        ...

    def evict(self, count: int) -> IntArray:
        """Give back `min(count, evictable_pages)` pages, the least recently used first."""
        ...

    def discard(self, handle: Any) -> IntArray:
        """Forget the unlocked pages of the prefix `handle` and what is cached behind them; gives them back."""
        ...


class NaiveCache:
    """No sharing: every request computes its own prompt."""

    root = None
    evictable_pages = 0
    num_pages = 0

    def match(self, tokens: IntArray, salt: bytes = b"") -> tuple[None, IntArray]:
        return None, NO_PAGES

    def lock(self, handle: None) -> None:
        pass

    def unlock(self, handle: None) -> None:
        pass

    def pages_freed_by_unlock(self, handle: None) -> int:
        return 0

    def has_continuation(self, handle: None, tokens: IntArray) -> bool:
        return True

    def insert(self, handle: None, tokens: IntArray, pages: IntArray) -> tuple[None, int]:
        return None, len(pages)

    def evict(self, count: int) -> IntArray:
        return NO_PAGES

    def discard(self, handle: None) -> IntArray:
        return NO_PAGES
