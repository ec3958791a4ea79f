"""Rates that a tenant may have. Pure: the caller has the clock, in seconds."""

from __future__ import annotations

import math
from typing import Final

_MINUTE: Final = 60.0


class Bucket:
    """Room for units at a constant rate. What is not used is saved, up to that of one minute, so in any minute at most
    twice the rate is used. It may owe units that were taken before their number was known: then it waits."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, units: int, now: float) -> None:
        self._level = self._level_at(now) - units
        self._at = now

    def set_missing(self, units: float, now: float) -> None:
        """Take over another count of this bucket, from which these units are missing."""
        self._level = self.per_minute - units
        self._at = now

    def seconds_until(self, units: int, now: float) -> float:
        """Return the time until there is room for `units`; 0: there is."""
        return max(units - self._level_at(now), 0.0) * _MINUTE / self.per_minute

    def remaining(self, now: float) -> int:
        return max(math.floor(self._level_at(now)), 0)

    def seconds_until_full(self, now: float) -> float:
        return self.seconds_until(self.per_minute, now)

    def with_rate(self, per_minute: int, now: float) -> Bucket:
        """Return a bucket of another rate from which as many units are missing."""
        if per_minute == self.per_minute:
            return self
        changed = Bucket(per_minute, now)
        changed.take(math.ceil(self.per_minute - self._level_at(now)), now)
        return changed

    def _level_at(self, now: float) -> float:
        return min(self._level + (now - self._at) * self.per_minute / _MINUTE, float(self.per_minute))


def duration(seconds: float) -> str:
    """Return a time as the headers `x-ratelimit-reset-*` have it: `12ms`, `1.5s`, `6m0s`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
