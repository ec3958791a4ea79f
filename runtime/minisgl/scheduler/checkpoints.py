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


class _Kept:
    """The checkpoint of a cached prefix."""

    __slots__ = ("kind", "prefix", "used_at", "uses", "value")

    def __init__(self, prefix: Prefix, kind: _Kind) -> None:
        self.prefix = prefix
        self.kind = kind
        self.uses = 0
        self.used_at = 0.0
        """Value of the last checkpoint that went when this one was used last."""
        self.value = 0.0
        """As of its last use: it has grown if the checkpoint before it went, and shrunk if one was saved between."""


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
        self._kept: dict[int, _Kept] = {}
        self._kinds: dict[int, _Kind] = {}
        self._every_kind = _Kind(_LIKELY)
        self._taken: dict[int, _Kind] = {}
        """Kinds of those of rows."""
        self._heaps: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
        """Values with their checkpoints, and those at rows; an entry with another value than its own is stale."""
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
            if other != NO_CHECKPOINT and self._kept[other].value < self._kept[least].value:
                self._drop_least(other)
            if self._spare:
                self._move(least, self._spare.pop())
            else:
                self._drop_least(least)
        checkpoint = self._free.pop()
        if kind not in self._kinds:
            self._kinds[kind] = _Kind(_UNLIKELY if kind > 0 else _LIKELY)
        self._taken[checkpoint] = self._kinds[kind]
        return checkpoint

    def give_back(self, checkpoint: int) -> None:
        """Free the checkpoint of a row."""
        del self._taken[checkpoint]
        self._free_one(checkpoint)

    def _free_one(self, checkpoint: int) -> None:
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
        kept = self._kept[checkpoint] = _Kept(prefix, self._taken.pop(checkpoint))
        for kind in (kept.kind, self._every_kind):
            kind.saves += 1
        if self._every_kind.saves >= _MOST_SAVES:
            for kind in (*self._kinds.values(), self._every_kind):
                kind.saves, kind.uses = kind.saves / 2, kind.uses / 2
        self._renew(checkpoint)

    def use(self, prefix: Prefix) -> None:
        """Count a use of the checkpoint of `prefix`."""
        kept = self._kept[prefix.checkpoint]
        for kind in (kept.kind, self._every_kind):
            kind.uses += 1
        kept.uses += 1
        self._renew(prefix.checkpoint)

    def drop(self, prefix: Prefix) -> None:
        """Free the checkpoint of a cached prefix, if it has one."""
        checkpoint, prefix.checkpoint = prefix.checkpoint, NO_CHECKPOINT
        if checkpoint != NO_CHECKPOINT:
            del self._kept[checkpoint]
            self._free_one(checkpoint)

    def next_row(self) -> int:
        """The row not in use whose place is worth least."""
        return min(self._unused, key=lambda slot: (self._value_at(slot), slot))

    def occupy(self, slot: int) -> None:
        """A row is in use from now on."""
        self._unused.remove(slot)
        for checkpoint in self.at_row(slot):
            if (kept := self._kept.get(checkpoint)) is not None:
                self.drop(kept.prefix)
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
        return sum(self._kept[checkpoint].value for checkpoint in self.at_row(slot) if checkpoint in self._kept)

    def _renew(self, checkpoint: int) -> None:
        kept = self._kept[checkpoint]
        kept.used_at = self._age
        self._set_value(checkpoint, self._age + self._worth(kept))

    def _worth(self, kept: _Kept) -> float:
        """Pages that a checkpoint will probably save."""
        return kept.prefix.saved_pages() * (1 + kept.uses) * kept.kind.odds / self._every_kind.odds

    def _least(self, at_rows: int) -> int:
        """The least valuable one of a prefix, of those at rows or of the others."""
        heap = self._heaps[at_rows]
        while heap:
            stored, least = heap[0]
            kept = self._kept.get(least)
            if kept is None or kept.value != stored:
                heapq.heappop(heap)
                continue
            value = kept.used_at + self._worth(kept)
            if value <= stored:
                # Lower values are found as they are: they must not make others older.
                kept.value = value
                heapq.heapreplace(heap, (value, least))
                return least
            self._set_value(least, value)
        return NO_CHECKPOINT

    def _drop_least(self, checkpoint: int) -> None:
        kept = self._kept[checkpoint]
        self._age = max(self._age, kept.value)
        self.drop(kept.prefix)

    def _move(self, checkpoint: int, to: int) -> None:
        kept = self._kept[checkpoint]
        self.drop(kept.prefix)
        kept.prefix.checkpoint = to
        self._kept[to] = kept
        self._set_value(to, kept.value)
        self._moves.append((checkpoint, to))

    def _set_value(self, checkpoint: int, value: float) -> None:
        self._kept[checkpoint].value = value
        at_rows = checkpoint < 0
        heap = self._heaps[at_rows]
        heapq.heappush(heap, (value, checkpoint))
        if len(heap) > 2 * len(self._kept) + 64:
            heap[:] = [(kept.value, other) for other, kept in self._kept.items() if (other < 0) is at_rows]
            heapq.heapify(heap)

    def take_freed(self) -> list[int]:
        """Checkpoints that were freed since the last call, even if taken again, without those at rows; none unless
        auditing."""
        freed = sorted(set(self._freed or ()))
        if self._freed:
            self._freed.clear()
        return freed
