"""Checkpoints of recurrent states: which are free, and which cached prefixes have one."""

from __future__ import annotations

import heapq
from typing import Final, Protocol

NO_CHECKPOINT: Final = -1


class Prefix(Protocol):
    """A cached prefix that may have a checkpoint."""

    checkpoint: int

    def saved_pages(self) -> int:
        """Pages that a request would compute again without the checkpoint."""
        ...


class Checkpoints:
    """Each one is free, of a row, or of a cached prefix. When there is no free one, the least valuable one of a prefix
    is freed: GreedyDual, with the pages that a request would compute again without it as its value, so that it ages
    while others are used. The next one behind it is worth more from then on, so old texts keep some, far apart."""

    def __init__(self, count: int, *, audit: bool) -> None:
        """`audit`: keep a list of the freed ones."""
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._prefixes: dict[int, Prefix] = {}
        self._values: dict[int, int] = {}
        """As of its last use: it has grown if the checkpoint before it went, and shrunk if one was saved between."""
        self._heap: list[tuple[int, int]] = []
        """Values with their checkpoints; an entry that differs from `_values` is stale."""
        self._used: dict[int, int] = {}
        """Value of the last one that went when each was used last."""
        self._age = 0
        self._freed: list[int] | None = [] if audit else None

    @property
    def used(self) -> int:
        """Those that are not free."""
        return self._count - len(self._free)

    def take(self) -> int:
        """A checkpoint for a row; NO_CHECKPOINT: all are those of rows."""
        if not self._free:
            if not self._values:
                return NO_CHECKPOINT
            self._drop_least()
        return self._free.pop()

    def give_back(self, checkpoint: int) -> None:
        """Free the checkpoint of a row."""
        self._free.append(checkpoint)
        if self._freed is not None:
            self._freed.append(checkpoint)

    def keep(self, checkpoint: int, prefix: Prefix) -> None:
        """Give the checkpoint of a row to a cached prefix, which has none."""
        assert prefix.checkpoint == NO_CHECKPOINT
        prefix.checkpoint = checkpoint
        self._prefixes[checkpoint] = prefix
        self.use(prefix)

    def use(self, prefix: Prefix) -> None:
        """Count a use of the checkpoint of `prefix`."""
        self._used[prefix.checkpoint] = self._age
        self._set_value(prefix.checkpoint, self._age + prefix.saved_pages())

    def drop(self, prefix: Prefix) -> None:
        """Free the checkpoint of a cached prefix, if it has one."""
        checkpoint, prefix.checkpoint = prefix.checkpoint, NO_CHECKPOINT
        if checkpoint != NO_CHECKPOINT:
            del self._prefixes[checkpoint], self._values[checkpoint], self._used[checkpoint]
            self.give_back(checkpoint)

    def _drop_least(self) -> None:
        while True:
            stored, least = heapq.heappop(self._heap)
            if self._values.get(least) != stored:
                continue
            value = self._used[least] + self._prefixes[least].saved_pages()
            if value <= stored:
                break
            self._set_value(least, value)
        self._age = max(self._age, value)
        self.drop(self._prefixes[least])

    def _set_value(self, checkpoint: int, value: int) -> None:
        self._values[checkpoint] = value
        heapq.heappush(self._heap, (value, checkpoint))
        if len(self._heap) > 2 * len(self._values) + 64:
            self._heap = [(value, checkpoint) for checkpoint, value in self._values.items()]
            heapq.heapify(self._heap)

    def take_freed(self) -> list[int]:
        """Checkpoints that were freed since the last call, even if taken again; none unless auditing."""
        freed = sorted(set(self._freed or ()))
        if self._freed:
            self._freed.clear()
        return freed
