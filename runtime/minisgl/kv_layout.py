"""Sizes of the KV cache: what pages take, how many a sequence holds, and how memory is divided among them. Pure.

Layers that attend to all tokens of a sequence need all of its pages. Layers with a window need the last ones, so they
have pages of their own, and those behind the window are released. A model may have layers of one kind only. Layers with
a recurrent state need no pages, but a sequence can begin behind a cached prefix only at a checkpoint of their states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

TYPICAL_TOKENS: Final = 2048
"""Tokens of a typical sequence, running or cached: a chat."""
_CHATS: Final = (TYPICAL_TOKENS // 2, TYPICAL_TOKENS, 2 * TYPICAL_TOKENS)
"""Tokens of chats, equally many of each length, for which the pages of layers with a window are made."""
_LAUNCHED_STEPS: Final = 2
_LAUNCHED_SHARE: Final = 0.125
"""Most pages, relative to those of all layers, for prompt tokens of launched steps: steps are shorter otherwise."""
_LEAST_CHECKPOINT_PAGES: Final = 4
_STATE_CHECKPOINTS: Final = 2
"""Checkpoints of a typical cached sequence: at the end of its prompt, and at that of its answer."""
KEPT_BEHIND: Final = 1
"""Pages that a row keeps behind its window: a request that continues may find a prefix that is one page shorter, since
its last token is always computed."""


def row_pages(window: int, page_size: int) -> int:
    """Most pages of layers with a window that a row holds between two steps: those that its next token attends to, with
    the one in which this token is stored, and those behind them."""
    return (window - 2) // page_size + 2 + KEPT_BEHIND


def checkpoint_pages(window: int, page_size: int) -> int:
    """Distance, in pages, of the places in a cached prompt whose windows are kept longer than those of others. A prompt
    that parts from it loses at most so many pages. A window of n pages serves one place, so wide windows have fewer
    places: with one every n² pages they take an n-th of the pages."""
    return max((-(-(window - 1) // page_size)) ** 2, _LEAST_CHECKPOINT_PAGES)


class PoolPages(NamedTuple):
    """Sizes of a KV pool."""

    full: int
    """Pages that sequences have in layers that attend to all tokens. They number the tokens of a sequence even if no
    layer does: then they take no memory."""
    window: int
    """Pages in layers with a window."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages of a model take on one rank."""

    page_size: int
    full_bytes: int
    """Bytes of a page in all layers that attend to all tokens."""
    window_bytes: int = 0
    """Bytes of a page in all layers with a window."""
    window: int | None = None
    """The longest window of a layer; None: no layer has one."""
    state_bytes: int = 0
    """Bytes of the recurrent states of a row, in all layers that have one."""
    checkpoints_per_row: int = 1
    """Checkpoints that take as many bytes."""
    caches_states: bool = True
    """Whether there is a prefix cache, for which states have checkpoints."""
    max_model_len: int
    max_running: int
    max_step_tokens: int

    @property
    def pages_per_row(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    def pool_bytes(self, pages: PoolPages) -> int:
        """Bytes of a pool, with the states of all rows, those of padding included, and their checkpoints."""
        rows = self.max_running + 1
        checkpoints = -(-self.state_checkpoints(pages.full) // self.checkpoints_per_row)
        return self._page_bytes(pages) + (rows + checkpoints) * self.state_bytes

    def _page_bytes(self, pages: PoolPages) -> int:
        return pages.full * self.full_bytes + pages.window * self.window_bytes

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` tokens holds between two steps of its answer."""
        pages = -(-tokens // self.page_size)
        held = 0 if self.window is None else min(pages, row_pages(self.window, self.page_size))
        return self._page_bytes(PoolPages(pages, held)) + self.state_bytes

    def state_checkpoints(self, full: int) -> int:
        """Checkpoints of recurrent states beside `full` pages; 0 if no layer has such a state.

        At most those of the sequences that the pages hold if they are typical and cached, and one for each that runs,
        which its answer moves along. A state with matrices takes as much memory as the keys and values of thousands of
        tokens; then checkpoints take as much as the pages, but there is one for each typical sequence: with more, fewer
        sequences run at the same time.
        """
        if not self.state_bytes or not self.caches_states:
            return 0
        sequences = -(-full * self.page_size // min(TYPICAL_TOKENS, self.max_model_len))
        most = min(self.max_running, sequences) + _STATE_CHECKPOINTS * sequences
        affordable = full * self.full_bytes * self.checkpoints_per_row // self.state_bytes
        return min(most, max(affordable, sequences, _STATE_CHECKPOINTS))

    def window_pages(self, full: int) -> int:
        """Pages of layers with a window beside `full` pages of the others; 0 if no layer has a window.

        A sequence of any length holds the pages of one window, so the right number depends on how long sequences are.
        Too few would leave the other pages unused while sequences are short, and cached prompts without the windows
        from which a request can continue them; too many take the memory of longer sequences. The pages are those that
        all pages can use if they are full of sequences of half, once and twice the typical length, equally many, with
        the windows that the cache keeps longest: with fewer, prefixes of chats were found less often than in one pool
        of the same memory. Where no layer attends to all tokens the other pages cost nothing, and sequences may all be
        as long as possible.

        To these come the prompt tokens of two steps, since one is launched before the pages of the step before it are
        released. More than `full` cannot be used: whoever has such a page has the other one, too.
        """
        if self.window is None:
            return 0
        if self.full_bytes:
            lengths = [min(tokens, self.max_model_len) for tokens in _CHATS]
            pages = [-(-length // self.page_size) for length in lengths]
            cached = -(-full * sum(map(self._kept_pages, pages)) // sum(pages))
        else:
            sequences = -(-full // self.pages_per_row)
            cached = sequences * min(self.pages_per_row, row_pages(self.window, self.page_size))
        step = -(-min(self.max_step_tokens, self.max_model_len) // self.page_size)
        launched = min(_LAUNCHED_STEPS * step, int(full * _LAUNCHED_SHARE))
        return max(min(full, cached + launched), self.least_window(full))

    def _kept_pages(self, pages: int) -> int:
        """Pages of layers with a window, of a cached sequence of `pages`, that are evicted behind all others: the first
        window, those at checkpoints and those that its row held at the end."""
        assert self.window is not None
        needed = -(-(self.window - 1) // self.page_size)
        checkpoints = (pages - 1) // checkpoint_pages(self.window, self.page_size)
        return min(pages, needed + checkpoints * needed + row_pages(self.window, self.page_size))

    def pages_for(self, available: int) -> PoolPages:
        """The pages that `available` bytes hold, at most those that all rows can fill.

        First the longest sequence must fit: if it would not beside `window_pages`, there are only as many of these as
        it needs, and what is left. Memory that the other pages cannot use is for layers with a window.
        """
        most = self.max_running * self.pages_per_row
        full = _largest(most, lambda pages: self._holds(available, pages, self.window_pages(pages)))
        if full < self.pages_per_row:
            full = _largest(self.pages_per_row, lambda pages: self._holds(available, pages, self.least_window(pages)))
        if self.window is None:
            return PoolPages(full, 0)
        rest = (available - self.pool_bytes(PoolPages(full, 0))) // self.window_bytes
        return PoolPages(full, max(min(full, rest), 0))

    def least_window(self, full: int) -> int:
        """Fewest pages of layers with a window with which a sequence of `full` pages can be served: those that it
        holds, and one for each launched step."""
        if self.window is None:
            return 0
        return min(full, row_pages(self.window, self.page_size) + _LAUNCHED_STEPS)

    def _holds(self, available: int, full: int, window: int) -> bool:
        return self.pool_bytes(PoolPages(full, window)) <= available


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, as do all below it; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
