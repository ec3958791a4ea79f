"""Counters of starts of replicas that are gone, so that sums over replicas never fall. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeAlias

import msgspec

from minisgl.wire.messages import Status

Start: TypeAlias = "tuple[str, tuple[int, int]]"
"""One start of a replica: its name and epoch."""

COUNTERS: Final = (
    "queue_times",
    "queue_seconds",
    "step_sizes",
    "step_tokens",
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "compiled_after_ready",
)
"""Fields of a status that are totals since its start."""

_KEPT: Final = 64
"""Starts that may still come back, as after a lost connection. Older ones are added up."""


class EndedTotals:
    """Last counters of each start that is not connected.

    Prometheus takes a counter that falls for one that began at 0 again, and counts all of the rest as new.
    """

    def __init__(self) -> None:
        self._last: dict[Start, Status] = {}
        self._older: Status | None = None

    def keep(self, start: Start, status: Status) -> None:
        """Keep the counters of a start that is gone, or seems to be."""
        self._last.pop(start, None)
        self._last[start] = status
        if len(self._last) > _KEPT:
            oldest = self._last.pop(next(iter(self._last)))
            self._older = oldest if self._older is None else add_counters(self._older, [oldest])

    def without(self, connected: Collection[Start]) -> list[Status]:
        """Return statuses whose counters are those of all starts that are not connected."""
        found = [status for start, status in self._last.items() if start not in connected]
        return found if self._older is None else [self._older, *found]


def add_counters(status: Status, others: Collection[Status]) -> Status:
    """Return a status with the counters of others added."""
    columns = {name: [getattr(each, name) for each in (status, *others)] for name in COUNTERS}
    return msgspec.structs.replace(status, **{name: sum_of(values) for name, values in columns.items()})


def sum_of(values: list[tuple[int, ...]] | list[float]) -> tuple[int, ...] | float:
    """Return the sum of numbers or of histograms, some of which may be empty: an older engine may send none."""
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip(*filter(None, values), strict=False)))
    return sum(values)
