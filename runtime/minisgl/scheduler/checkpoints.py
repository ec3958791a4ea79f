"""Checkpoints of recurrent states: which are free, and which cached prefixes have one."""

from __future__ import annotations

import heapq
from typing import Final, Protocol

NO_CHECKPOINT: Final = -1
_MOST_SAVES: Final = 1000
"""Then all counts are halved, so that they follow the load."""
_DOUBT: Final = 0.6
"""Weight of the first guess of how often a kind is used, in checkpoints. With more, kinds without any use stay long."""
_LIKELY, _UNLIKELY = 0.5, 0.1


class Prefix(Protocol):
    """A cached prefix that may have a checkpoint."""

    checkpoint: int

    def saved_pages(self) -> int:
        """Pages that a request would compute again without the checkpoint."""
        ...


class _Kind:
    """How often checkpoints that are saved for one reason are used."""

    __slots__ = ("guess", "saves", "uses")

    def __init__(self, guess: float) -> None:
        self.guess = guess
        self.saves = self.uses = 0.0

    @property
    def odds(self) -> float:
        """Uses for each one saved; the guess before any was."""
        return (self.uses + _DOUBT * self.guess) / (self.saves + _DOUBT)


class Checkpoints:
    """Each one is free, of a row, or of a cached prefix. When there is no free one, the least valuable one of a prefix
    is freed: GreedyDual, with the pages that a request would compute again without it as its value, so that it ages
    while others are used. The next one behind it is worth more from then on, so old texts keep some, far apart.

    Loads differ in where their texts part: the pages count as often as checkpoints of the same kind were used, in
    proportion to those of all kinds, and once more for each use of the checkpoint itself.

    Places of rows that are not in use have further ones, with negative numbers, see `at_row`: a prefix whose checkpoint
    is freed gets one there, to which the state moves, until a row needs the place."""

    def __init__(self, count: int, *, audit: bool, rows: int = 0, per_row: int = 1) -> None:
        """`audit`: keep a list of the freed ones. `rows`: none of which is in use; the place of each has `per_row`."""
        self._count = count
        self._num_rows = rows
        self._per_row = per_row
        self._unused = set(range(rows))
        """Rows that are not in use."""
        self._free = list(range(count - 1, -1, -1))
        self._spare = [checkpoint for slot in reversed(range(rows)) for checkpoint in self.at_row(slot)]
        """Those at rows that are not in use which no prefix has."""
        self._prefixes: dict[int, Prefix] = {}
        self._kinds: dict[int, _Kind] = {}
        self._every_kind = _Kind(_LIKELY)
        self._kind_of: dict[int, int] = {}
        """Kinds of those that are not free."""
        self._values: dict[int, float] = {}
        """As of its last use: it has grown if the checkpoint before it went, and shrunk if one was saved between."""
        self._heaps: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
        """Values with their checkpoints, and those at rows; an entry that differs from `_values` is stale."""
        self._uses: dict[int, int] = {}
        """Times that each was used."""
        self._used: dict[int, float] = {}
        """Value of the last one that went when each was used last."""
        self._age = 0.0
        self._freed: list[int] | None = [] if audit else None
        self._moves: list[tuple[int, int]] = []

    @property
    def used(self) -> int:
        """Those that are not free, without those at rows."""
        return self._count - len(self._free)

    def at_row(self, slot: int) -> range:
        """Those whose states are in the place of a row. Engines have the places of all rows and of one for padding,
        then those of checkpoints."""
        first = (slot - self._num_rows - 1) * self._per_row
        return range(first, first + self._per_row)

    def take(self, kind: int = 0) -> int:
        """A checkpoint for a row; NO_CHECKPOINT: all are those of rows. `kind`: number of the reason to save it,
        above 0 if nobody is known to need it."""
        if not self._free:
            if (least := self._least(0)) == NO_CHECKPOINT:
                return NO_CHECKPOINT
            other = NO_CHECKPOINT if self._spare else self._least(1)
            if other != NO_CHECKPOINT and self._values[other] < self._values[least]:
                self._drop_least(other)
            if self._spare:
                self._move(least, self._spare.pop())
            else:
                self._drop_least(least)
        checkpoint = self._free.pop()
        self._kind_of[checkpoint] = kind
        if kind not in self._kinds:
            self._kinds[kind] = _Kind(_UNLIKELY if kind > 0 else _LIKELY)
        return checkpoint

    def give_back(self, checkpoint: int) -> None:
        """Free a checkpoint."""
        if checkpoint < 0:
            self._spare.append(checkpoint)
            return
        self._free.append(checkpoint)
        if self._freed is not None:
            self._freed.append(checkpoint)

    def keep(self, checkpoint: int, prefix: Prefix) -> None:
        """Give the checkpoint of a row to a cached prefix, which has none."""
        assert prefix.checkpoint == NO_CHECKPOINT
        prefix.checkpoint = checkpoint
        self._prefixes[checkpoint] = prefix
        self._uses[checkpoint] = 0
        for kind in (self._kinds[self._kind_of[checkpoint]], self._every_kind):
            kind.saves += 1
        if self._every_kind.saves >= _MOST_SAVES:
            for kind in (*self._kinds.values(), self._every_kind):
                kind.saves, kind.uses = kind.saves / 2, kind.uses / 2
        self._renew(prefix)

    def use(self, prefix: Prefix) -> None:
        """Count a use of the checkpoint of `prefix`."""
        for kind in (self._kinds[self._kind_of[prefix.checkpoint]], self._every_kind):
            kind.uses += 1
        self._uses[prefix.checkpoint] += 1
        self._renew(prefix)

    def drop(self, prefix: Prefix) -> None:
        """Free the checkpoint of a cached prefix, if it has one."""
        checkpoint, prefix.checkpoint = prefix.checkpoint, NO_CHECKPOINT
        if checkpoint != NO_CHECKPOINT:
            del self._prefixes[checkpoint], self._values[checkpoint], self._used[checkpoint]
            self.give_back(checkpoint)

    def next_row(self) -> int:
        """The row not in use whose place is worth least."""
        return min(self._unused, key=lambda slot: (self._value_at(slot), slot))

    def occupy(self, slot: int) -> None:
        """A row is in use from now on."""
        self._unused.remove(slot)
        for checkpoint in self.at_row(slot):
            if (prefix := self._prefixes.get(checkpoint)) is not None:
                self.drop(prefix)
            self._spare.remove(checkpoint)

    def vacate(self, slot: int) -> None:
        """A row is in use no more."""
        self._unused.add(slot)
        self._spare += self.at_row(slot)

    def take_moves(self) -> list[tuple[int, int]]:
        """Checkpoints whose states have moved since the last call, and those where they are now, in order."""
        moves, self._moves = self._moves, []
        return moves

    def _value_at(self, slot: int) -> float:
        return sum(self._values[checkpoint] for checkpoint in self.at_row(slot) if checkpoint in self._values)

    def _renew(self, prefix: Prefix) -> None:
        self._used[prefix.checkpoint] = self._age
        self._set_value(prefix.checkpoint, self._age + self._worth(prefix))

    def _worth(self, prefix: Prefix) -> float:
        """Pages that a checkpoint will probably save."""
        kind = self._kinds[self._kind_of[prefix.checkpoint]]
        uses = 1 + self._uses[prefix.checkpoint]
        return prefix.saved_pages() * uses * kind.odds / self._every_kind.odds

    def _least(self, at_rows: int) -> int:
        """The least valuable one of a prefix, of those at rows or of the others."""
        heap = self._heaps[at_rows]
        while heap:
            stored, least = heap[0]
            if self._values.get(least) != stored:
                heapq.heappop(heap)
                continue
            value = self._used[least] + self._worth(self._prefixes[least])
            if value <= stored:
                # Lower values are found as they are: they must not make others older.
                self._values[least] = value
                heapq.heapreplace(heap, (value, least))
                return least
            self._set_value(least, value)
        return NO_CHECKPOINT

    def _drop_least(self, checkpoint: int) -> None:
        self._age = max(self._age, self._values[checkpoint])
        self.drop(self._prefixes[checkpoint])

    def _move(self, checkpoint: int, to: int) -> None:
        prefix, used, value = self._prefixes[checkpoint], self._used[checkpoint], self._values[checkpoint]
        self._kind_of[to], self._uses[to] = self._kind_of[checkpoint], self._uses[checkpoint]
        self.drop(prefix)
        prefix.checkpoint = to
        self._prefixes[to], self._used[to] = prefix, used
        self._set_value(to, value)
        self._moves.append((checkpoint, to))

    def _set_value(self, checkpoint: int, value: float) -> None:
        self._values[checkpoint] = value
        at_rows = checkpoint < 0
        heap = self._heaps[at_rows]
        heapq.heappush(heap, (value, checkpoint))
        if len(heap) > 2 * len(self._values) + 64:
            heap[:] = [(value, other) for other, value in self._values.items() if (other < 0) is at_rows]
            heapq.heapify(heap)

    def take_freed(self) -> list[int]:
        """Checkpoints that were freed since the last call, even if taken again, without those at rows; none unless
        auditing."""
        freed = sorted(set(self._freed or ()))
        if self._freed:
            self._freed.clear()
        return freed
