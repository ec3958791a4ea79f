"""Counters of starts of replicas that are gone, so that sums over replicas never fall. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from minisgl.wire.messages import Counters, Status

Start: TypeAlias = "tuple[str, tuple[int, int]]"
"""One start of a replica: its name and epoch."""

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
    found = [status, *others]
    compiled = sum(one.compiled_after_ready for one in found)
    return replace(status, counters=sum_of([one.counters for one in found]), compiled_after_ready=compiled)


def sum_of(counters: Sequence[Counters]) -> Counters:
    """Return the sums of numbers and of histograms."""
    columns = [(name, [getattr(one, name) for one in counters]) for name in Counters.__struct_fields__]
    return Counters(**{name: _sum(values) for name, values in columns})


def _sum(values: list[Any]) -> Any:
    return [sum(bucket) for bucket in zip(*values, strict=False)] if isinstance(values[0], list) else sum(values)
