"""Radix tree over pages of token ids (the idea is that of SGLang, arXiv 2312.07104), with eviction in O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.checkpoints import NO_CHECKPOINT, Checkpoints
from minisgl.scheduler.pages import NO_PAGES
from minisgl.scheduler.window_pages import ABSENT, NO_REFERENCES, References, WindowPages
from minisgl.wire.plan import IntArray


class Node:
    """Edge of the tree: `tokens` continue the parent's prefix, and `pages` hold their KV. `windows` refers to their
    pages of layers with a window; it is empty in a cache without these. `checkpoint` is that of the recurrent states
    behind its tokens, if it has one."""

    __slots__ = ("checkpoint", "children", "last_used", "locks", "pages", "parent", "tokens", "windows")

    def __init__(
        self, parent: Node | None, tokens: IntArray, pages: IntArray, windows: References, last_used: int
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.windows = windows
        self.checkpoint = NO_CHECKPOINT
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = last_used

    def saved_pages(self) -> int:
        """Pages between this prefix and the last checkpoint before it."""
        assert self.parent is not None
        return _distance(self, _resumable(self.parent))


class _SaltedRoot(Node):
    """Empty prefix of the requests with one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: bytes) -> None:
        super().__init__(None, NO_PAGES, NO_PAGES, NO_REFERENCES, 0)
        self.salt = salt


class RadixCache:
    """One tree for requests without a salt, and one for each salt in use.

    Invariants: a node's locks ≥ the sum of its children's locks, so all nodes below an unlocked one are unlocked;
    `evictable_pages` counts the pages of all unlocked nodes; every unlocked leaf has an entry in the heap with its
    current `last_used`. Other heap entries are stale and skipped."""

    def __init__(
        self, page_size: int, windows: WindowPages | None = None, checkpoints: Checkpoints | None = None
    ) -> None:
        """`windows`: pages of layers with a window. `checkpoints`: those of recurrent states."""
        self.page_size = page_size
        self.checkpoints = checkpoints
        self._windows = windows
        self.root = Node(None, NO_PAGES, NO_PAGES, NO_REFERENCES, 0)
        self.salted: dict[bytes, _SaltedRoot] = {}
        """Roots that are locked or have children."""
        self.evictable_pages = 0
        self.num_pages = 0
        self._nodes = 0
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []

    def match(self, tokens: IntArray, salt: bytes = b"") -> tuple[Node, IntArray]:
        root = self.root
        if salt:
            root = self.salted.get(salt) or self.salted.setdefault(salt, _SaltedRoot(salt))
        node, matched, path = self._walk(root, tokens)
        return node, np.concatenate(path) if matched else NO_PAGES

    def find(self, tokens: IntArray, salt: bytes = b"") -> Node | None:
        """Handle of whole pages of `tokens`; None: the cache does not have all of them."""
        if salt and salt not in self.salted:
            return None
        node, pages = self.match(tokens, salt)
        return node if len(pages) and len(pages) * self.page_size == len(tokens) else None

    def resumable(self, handle: Node) -> tuple[Node, int]:
        """Longest prefix of `handle` with a checkpoint, or the empty one, and its number of pages."""
        node = _resumable(handle)
        return node, _distance(node, None)

    def lock(self, handle: Node) -> None:
        self._clock += 1
        node: Node | None = handle
        while node is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node.last_used = self._clock
            node = node.parent

    def unlock(self, handle: Node) -> None:
        self._clock += 1
        node: Node | None = handle
        while node is not None:
            assert node.locks > 0, "a prefix is unlocked more often than locked"
            node.locks -= 1
            node.last_used = self._clock
            if node.locks == 0:
                self.evictable_pages += len(node.pages)
                self._push_evictable(node)
            node = node.parent

    def pages_freed_by_unlock(self, handle: Node) -> int:
        count = 0
        node: Node | None = handle
        while node is not None and node.locks == 1:
            count += len(node.pages)
            node = node.parent
        return count

    def has_continuation(self, handle: Node, tokens: IntArray) -> bool:
        return tokens[: self.page_size].tobytes() in handle.children

    def windows(self, handle: Node) -> References:
        path: list[References] = []
        node: Node | None = handle
        while node is not None:
            path.append(node.windows)
            node = node.parent
        return np.concatenate(path[::-1])

    def fill_windows(self, handle: Node, tokens: IntArray, windows: References) -> tuple[NDArray[np.bool_], int]:
        assert self._windows is not None
        node, matched, _ = self._walk(handle, tokens)
        taken = np.zeros(len(windows), np.bool_)
        end = matched
        while node is not handle:
            assert node.parent is not None
            begin = end - len(node.pages)
            new = ~self._windows.is_present(node.windows) & (windows[begin:end] != ABSENT)
            node.windows[new] = windows[begin:end][new]
            taken[begin:end] = new
            node, end = node.parent, begin
        return taken, matched

    def insert(
        self, handle: Node, tokens: IntArray, pages: IntArray, windows: References = NO_REFERENCES
    ) -> tuple[Node, int]:
        assert len(tokens) == len(pages) * self.page_size, "only whole pages can be cached"
        node, matched, _ = self._walk(handle, tokens)
        if matched == len(pages):
            return node, matched
        tail = tokens[matched * self.page_size :].copy()
        self._clock += 1
        leaf = Node(node, tail, pages[matched:].copy(), windows[matched:].copy(), self._clock)
        node.children[tail[: self.page_size].tobytes()] = leaf
        self._nodes += 1
        self.num_pages += len(leaf.pages)
        self.evictable_pages += len(leaf.pages)
        self._push_evictable(leaf)
        return leaf, matched

    def evict(self, count: int) -> IntArray:
        taken: list[IntArray] = []
        windows: list[References] = []
        missing = count
        while missing > 0 and self._heap:
            last_used, _, node = self._heap[0]
            if not self._evictable(node, last_used):
                heapq.heappop(self._heap)
                continue
            if len(node.pages) > missing:
                # The first pages of the node remain a valid prefix: only its tail is evicted.
                self._drop_checkpoint(node)
                taken.append(node.pages[-missing:])
                windows.append(node.windows[-missing:])
                node.pages, node.windows = node.pages[:-missing], node.windows[:-missing]
                node.tokens = node.tokens[: len(node.pages) * self.page_size]
                missing = 0
            else:
                heapq.heappop(self._heap)
                self._drop_checkpoint(node)
                taken.append(node.pages)
                windows.append(node.windows)
                missing -= len(node.pages)
                self._remove(node)
        if not taken:
            return NO_PAGES
        if self._windows is not None:
            self._windows.drop(np.concatenate(windows))
        pages = np.concatenate(taken)
        self.num_pages -= len(pages)
        self.evictable_pages -= len(pages)
        return pages

    def discard(self, handle: Node) -> IntArray:
        top = handle
        while top.parent is not None and top.parent.parent is not None and top.parent.locks == 0:
            top = top.parent
        parent = top.parent
        if parent is None or top.locks:
            return NO_PAGES
        del parent.children[top.tokens[: self.page_size].tobytes()]
        gone = [top]
        for node in gone:
            gone += node.children.values()
            node.parent = None
            self._drop_checkpoint(node)
        pages = np.concatenate([node.pages for node in gone])
        if self._windows is not None:
            self._windows.drop(np.concatenate([node.windows for node in gone]))
        self._nodes -= len(gone)
        self.num_pages -= len(pages)
        self.evictable_pages -= len(pages)
        self._push_evictable(parent)
        return pages

    def nodes(self) -> Iterator[Node]:
        """All nodes except the roots, parents first."""
        stack = [child for root in (self.root, *self.salted.values()) for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _drop_checkpoint(self, node: Node) -> None:
        if self.checkpoints is not None:
            self.checkpoints.drop(node)

    def _walk(self, node: Node, tokens: IntArray) -> tuple[Node, int, list[IntArray]]:
        """Follow `tokens` down from `node`; split the last node where it matches in part. Returns the node reached, the
        number of pages matched and these pages."""
        page = self.page_size
        position, end = 0, len(tokens) // page * page
        path: list[IntArray] = []
        while position < end:
            child = node.children.get(tokens[position : position + page].tobytes())
            if child is None:
                break
            size = min(len(child.tokens), end - position)
            differs = np.flatnonzero(child.tokens[:size] != tokens[position : position + size])
            common = (int(differs[0]) if len(differs) else size) // page
            if common < len(child.pages):
                child = self._split(child, common)
            path.append(child.pages)
            position += common * page
            node = child
            if len(differs):
                break
        return node, position // page, path

    def _split(self, node: Node, count: int) -> Node:
        """Move the first `count` pages of `node` to a new parent. `node` keeps the rest, so the handles of requests
        that have locked it still stand for their whole prefix."""
        assert node.parent is not None
        assert 0 < count < len(node.pages)
        cut = count * self.page_size
        upper = Node(node.parent, node.tokens[:cut], node.pages[:count], node.windows[:count], node.last_used)
        upper.locks = node.locks
        node.parent.children[node.tokens[: self.page_size].tobytes()] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[count:]
        node.windows = node.windows[count:]
        upper.children[node.tokens[: self.page_size].tobytes()] = node
        self._nodes += 1
        return upper

    def _evictable(self, node: Node, last_used: int) -> bool:
        return node.last_used == last_used and node.locks == 0 and not node.children and node.parent is not None

    def _push_evictable(self, node: Node) -> None:
        """Push a leaf that became evictable onto the heap; drop the root of a salt that is no longer in use."""
        if not self._evictable(node, node.last_used):
            if isinstance(node, _SaltedRoot) and not node.locks and not node.children:
                del self.salted[node.salt]
            return
        heapq.heappush(self._heap, (node.last_used, id(node), node))
        if len(self._heap) > 2 * self._nodes + 64:
            self._heap = [entry for entry in self._heap if self._evictable(entry[2], entry[0])]
            heapq.heapify(self._heap)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self.page_size].tobytes()]
        leaf.parent = None
        self._nodes -= 1
        self._push_evictable(parent)


def _resumable(node: Node) -> Node:
    """The node or the next one above it with a checkpoint, or the root."""
    while node.parent is not None and node.checkpoint == NO_CHECKPOINT:
        node = node.parent
    return node


def _distance(node: Node | None, above: Node | None) -> int:
    """Pages between a node and one of those above it; None: all down from the root."""
    pages = 0
    while node is not None and node is not above:
        pages += len(node.pages)
        node = node.parent
    return pages
