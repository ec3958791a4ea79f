"""The mean time for which requests waited in an engine's queue lately, from its counters. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from minisgl.wire.messages import Status

WINDOW_SECONDS: Final = 30.0
_STEP_SECONDS: Final = 1.0
"""A status comes ten times a second; one sample a second is enough."""


class _Sample(NamedTuple):
    """Requests admitted since the engine's start, and the sum of their times in the queue, at a time in seconds."""

    time: float
    admitted: int
    waited: float


class QueueTimes:
    """Queue times of one start of an engine."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._last: Status | None = None
        self._now = 0.0

    def add(self, status: Status, now: float) -> None:
        self._last, self._now = status, now
        if self._samples and now - self._samples[-1].time < _STEP_SECONDS:
            return
        self._samples.append(_Sample(now, sum(status.counters.queue_times), status.counters.queue_seconds))
        # One sample that is older than the window stays, so that the rest covers all of it.
        while len(self._samples) > 1 and now - self._samples[1].time >= WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def mean_ms(self) -> float | None:
        """Milliseconds; None before the first status. While none of the waiting requests is
        admitted, the time for which this has been so."""
        if self._last is None:
            return None
        first = self._samples[0]
        counters = self._last.counters
        admitted = sum(counters.queue_times) - first.admitted
        if admitted > 0:
            return max(0.0, 1000 * (counters.queue_seconds - first.waited) / admitted)
        return 1000 * (self._now - first.time) if self._last.waiting > self._last.deferred else 0.0
