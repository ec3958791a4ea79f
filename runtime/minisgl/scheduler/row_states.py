"""Recurrent states of rows: what they begin with, and the checkpoints that they leave in the prefix cache.

A state stands for all tokens before it, so a request can begin behind a cached prefix only at a checkpoint. One with
matrices costs as much memory as thousands of tokens of keys and values, so there are few: at the end of a prompt, where
a prompt parts from a cached one, at the end of an answer, and behind 2, 3, 5, 8, 13 … blocks of a prompt. All are at
ends of blocks, which are whole pages and whole chunks of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.scheduler.checkpoints import NO_CHECKPOINT, Checkpoints
from minisgl.scheduler.radix_cache import Node, RadixCache
from minisgl.scheduler.request import Request, RequestTable
from minisgl.wire.plan import NO_STATE_CHANGES, IntArray, StateChange

CHUNK_TOKENS: Final = 64
"""Tokens that the kernels of linear attention compute together."""


_END: Final = 0
_JUNCTION: Final = -1
_ANSWER: Final = -2
"""Kinds of checkpoints: at the end of a prompt, where it parts from a cached one, and in an answer. Those behind n
blocks of a prompt are of kind n."""


class _RowCheckpoints:
    """Checkpoints of a row."""

    __slots__ = ("answer", "answer_tokens", "junction", "kept", "saved")

    def __init__(self) -> None:
        self.junction = 0
        """Number of its first tokens that the cache had without a state, in whole blocks."""
        self.saved: dict[int, int] = {}
        """Checkpoints of its prompt that no cached prefix has yet, by the number of tokens before them."""
        self.answer = NO_CHECKPOINT
        """The one that is saved again at each end of a block of the answer."""
        self.answer_tokens = 0
        self.kept: list[Node] = []
        """Cached prefixes that got a checkpoint of the row."""


class RowStates:
    """Makes `StepPlan.state_changes`. A checkpoint can be found from the next plan on: within a step, states are loaded
    before any is saved."""

    def __init__(self, config: SchedulerConfig, table: RequestTable, cache: RadixCache | None) -> None:
        """`cache`: the prefix cache, with checkpoints; None: no prefix is cached."""
        self.block = math.lcm(config.page_size, CHUNK_TOKENS)
        """Tokens from one place of checkpoints to the next."""
        self._table = table
        self._cache = cache
        self._page_size = config.page_size
        self._rows = [_RowCheckpoints() for _ in range(config.max_running)]
        self._changes: list[tuple[int, int, int, int]] = []
        self._moved: dict[int, int] = {}
        """Checkpoints at rows to which the next plan moves states, and those where these are until then."""
        self._new: list[int] = []
        """Rows with checkpoints that the next plan saves."""

    @property
    def used_checkpoints(self) -> int:
        """Those that a row or a cached prefix has."""
        return 0 if self._cache is None else self._checkpoints.used

    @property
    def _checkpoints(self) -> Checkpoints:
        assert self._cache is not None and self._cache.checkpoints is not None
        return self._cache.checkpoints

    def next_row(self) -> int | None:
        """The row for the next request; None: any that is not in use."""
        return None if self._cache is None else self._checkpoints.next_row()

    def attach(self, slot: int, prefix: Any, pages: int, matched_pages: int) -> None:
        """Let a row begin behind the first `pages` pages, those of the cached `prefix`, which has a checkpoint if there
        are any. `matched_pages`: how many the cache has of its sequence."""
        row = self._rows[slot] = _RowCheckpoints()
        row.junction = self._whole(matched_pages * self._page_size)
        change = (StateChange.ZERO, slot, 0, 0)
        if pages:
            assert self._cache is not None
            self._checkpoints.use(prefix)
            source = self._moved.get(prefix.checkpoint, prefix.checkpoint)
            change = (StateChange.LOAD, slot, pages * self._page_size, source)
        if self._cache is not None:
            self._checkpoints.occupy(slot)
            self._forget_changes(slot)
        self._changes.append(change)

    def extend(self, slot: int, start: int, length: int) -> None:
        """The next plan computes `length` tokens of a row's prompt."""
        if self._cache is None:
            return
        row, prompt = self._rows[slot], int(self._table.prefill_end[slot])
        # The last token of a prompt is always computed.
        last = self._whole(prompt - 1)
        # Others may continue any part of it, more often one that is short.
        kinds = {blocks * self.block: blocks for blocks in _fibonacci(last // self.block)}
        kinds |= {last: _END, row.junction: _JUNCTION}
        # The likely ones first, since there may be fewer checkpoints.
        for tokens, kind in sorted(kinds.items(), key=lambda place: (place[1] > 0, place)):
            if start < tokens <= start + length and (checkpoint := self._take(kind)) != NO_CHECKPOINT:
                row.saved[tokens] = checkpoint
                self._save(slot, tokens, checkpoint)
        if start + length == prompt and prompt % self.block == 0:
            self._save_answer(slot, prompt)

    def decode(self, slots: IntArray, positions: IntArray) -> None:
        """The next plan computes a token of each of these rows, at `positions`."""
        if self._cache is None:
            return
        for index in np.flatnonzero((positions + 1) % self.block == 0).tolist():
            self._save_answer(int(slots[index]), int(positions[index]) + 1)

    def will_save(self, request: Request, lengths: range) -> bool:
        """Whether the next plan saves the state behind the first tokens of a request, so many as in `lengths`."""
        for slot in self._new:
            if self._table.request(slot).cache_salt == request.cache_salt:
                for tokens in self._rows[slot].saved:
                    if tokens in lengths and np.array_equal(self._table.tokens[slot, :tokens], request.tokens[:tokens]):
                        return True
        return False

    def take_changes(self) -> IntArray:
        """`StepPlan.state_changes` [4, K] of the plan that is complete now."""
        changes = self._changes
        if self._cache is not None:
            changes += [(StateChange.POISON, 0, 0, freed) for freed in self._checkpoints.take_freed()]
        if not changes:
            return NO_STATE_CHANGES
        self._changes = []
        self._moved.clear()
        for slot in self._new:
            self._keep(slot)
        self._new.clear()
        return np.array(changes, np.int32).T

    def release(self, slot: int, *, damaged: bool) -> None:
        """Take the checkpoints of a row that is released, after the cache has taken its pages. `damaged`: neither its
        states nor those that it left are of use."""
        # No plan has told the engine of a row that ends before it runs.
        self._forget_changes(slot)
        row, self._rows[slot] = self._rows[slot], _RowCheckpoints()
        if self._cache is None:
            return
        checkpoints = self._checkpoints
        checkpoints.vacate(slot)
        if damaged:
            # Also those that others have saved there since, which are as rare.
            for node in row.kept:
                checkpoints.drop(node)
        elif row.answer != NO_CHECKPOINT and row.answer_tokens <= int(self._table.length[slot]):
            self._keep_at(slot, row.answer_tokens, row.answer)
            row.answer = NO_CHECKPOINT
        if not damaged:
            for tokens in [*row.saved]:
                self._keep_at(slot, tokens, row.saved.pop(tokens))
        for checkpoint in (*row.saved.values(), row.answer):
            if checkpoint != NO_CHECKPOINT:
                checkpoints.give_back(checkpoint)

    def _take(self, kind: int) -> int:
        """A checkpoint for a row; the next plan moves the state that was there, if it is kept."""
        checkpoint = self._checkpoints.take(kind)
        for source, to in self._checkpoints.take_moves():
            self._forget_moves(range(to, to + 1))
            self._moved[to] = source
            self._changes.append((StateChange.MOVE, to, 0, source))
        return checkpoint

    def _forget_changes(self, slot: int) -> None:
        """Leave out what the plan in the making does to the place of a row, where nobody needs that."""
        self._changes = [change for change in self._changes if change[0] == StateChange.MOVE or change[1] != slot]
        if self._cache is not None:
            self._forget_moves(self._checkpoints.at_row(slot))

    def _forget_moves(self, targets: range) -> None:
        """Leave out moves to these checkpoints."""
        self._changes = [
            change for change in self._changes if change[0] != StateChange.MOVE or change[1] not in targets
        ]

    def _whole(self, tokens: int) -> int:
        return tokens // self.block * self.block

    def _save_answer(self, slot: int, tokens: int) -> None:
        """Let the next plan save the state behind so many tokens, in place of the last one that the answer left."""
        row = self._rows[slot]
        if row.answer == NO_CHECKPOINT:
            row.answer = self._take(_ANSWER)
        if row.answer != NO_CHECKPOINT:
            row.answer_tokens = tokens
            self._save(slot, tokens, row.answer)

    def _save(self, slot: int, tokens: int, checkpoint: int) -> None:
        self._changes.append((StateChange.SAVE, slot, tokens, checkpoint))
        self._new.append(slot)

    def _keep(self, slot: int) -> None:
        """Give checkpoints of a row's prompt to prefixes that the cache has by now."""
        row, cache = self._rows[slot], self._cache
        assert cache is not None
        for tokens, checkpoint in [*row.saved.items()]:
            node = cache.find(self._table.tokens[slot, :tokens], self._table.request(slot).cache_salt)
            if node is None:
                continue
            del row.saved[tokens]
            if self._give(node, checkpoint):
                row.kept.append(node)

    def _keep_at(self, slot: int, tokens: int, checkpoint: int) -> None:
        """Give a checkpoint of a row that ends to its prefix, if the cache has that."""
        cache = self._cache
        assert cache is not None
        node = cache.find(self._table.tokens[slot, :tokens], self._table.request(slot).cache_salt)
        if node is None:
            self._checkpoints.give_back(checkpoint)
        else:
            self._give(node, checkpoint)

    def _give(self, node: Node, checkpoint: int) -> bool:
        """Whether the prefix took it: it has none yet."""
        if node.checkpoint != NO_CHECKPOINT:
            self._checkpoints.give_back(checkpoint)
            return False
        self._checkpoints.keep(checkpoint, node)
        return True


def _fibonacci(most: int) -> Iterator[int]:
    """Fibonacci numbers from 2 up to `most`."""
    number, following = 2, 3
    while number <= most:
        yield number
        number, following = following, number + following
