"""Which models are to be looked at, with the semantics of client-go's work queue and two lanes.

A key that is added many times while it waits or is being worked on is worked on once more, and never by two workers
at once. Delayed keys keep their earliest time. Failures of a key lengthen its own delay only. An urgent key, one whose
spec somebody has just edited, overtakes those that only want to be looked at again: a full list adds thousands.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_FIRST_DELAY: Final = 0.5
# An hour-long outage of something that a model needs ends, for that model, within this time of its cure.
_LONGEST_DELAY: Final = 60.0


class WorkQueue(Generic[Key]):
    """Lives in one event loop."""

    def __init__(self) -> None:
        self.adds = 0
        self.retries = 0
        # Dicts keep the order of their keys. A key is in at most one of these three.
        self._urgent: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}
        self._again: dict[Key, bool] = {}
        self._available = asyncio.Semaphore(0)
        self._processing: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._urgent) + len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits for a worker and nothing is being worked on; keys may be due later."""
        return not self.depth and not self._processing

    def longest_running(self) -> float:
        """Seconds since the oldest of the keys that are being worked on was handed out; 0 when there is none."""
        return _now() - min(self._processing.values(), default=_now())

    def add(self, key: Key, urgent: bool = False) -> None:
        self.adds += 1
        if key in self._processing:
            self._again[key] = urgent or self._again.get(key, False)
        else:
            self._put(key, urgent)

    def add_after(self, key: Key, seconds: float) -> None:
        """Add the key then, unless it is already due earlier."""
        due = _now() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(due, self._add_due, key)

    def retry(self, key: Key) -> None:
        """Add the key again after a delay that doubles with each of its failures."""
        self.retries += 1
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is bounded because a float is.
        delay = min(_FIRST_DELAY * 2 ** min(failures, 16), _LONGEST_DELAY)
        self.add_after(key, delay * random.uniform(0.8, 1.2))

    def forget(self, key: Key) -> None:
        """The key's failures are over."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The next key. `done` must follow, whatever became of it."""
        await self._available.acquire()
        lane = self._urgent or self._waiting
        key = next(iter(lane))
        del lane[key]
        self._processing[key] = _now()
        return key

    def done(self, key: Key) -> None:
        del self._processing[key]
        if key in self._again:
            self._put(key, self._again.pop(key))

    def close(self) -> None:
        """Drop the timers. Nothing is to be added afterwards."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _put(self, key: Key, urgent: bool) -> None:
        if key in self._urgent:
            return
        if key not in self._waiting:
            self._available.release()
        elif urgent:
            del self._waiting[key]
        (self._urgent if urgent else self._waiting)[key] = None

    def _add_due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
