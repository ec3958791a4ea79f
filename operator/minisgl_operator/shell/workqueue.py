"""Work queue of models to reconcile, with the semantics of client-go's and two priorities.

A key that is added many times while it waits or is processed is processed once more, and never by two workers at the
same time. Delayed keys keep their earliest time. Failures of a key lengthen its own delay only. An urgent key, such as
a model with an edited spec, goes ahead of normal ones: a full list adds thousands of them. Few normal keys are
processed at a time, and fewer beside an urgent one, which would queue behind all of them at each of its waits.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

_FIRST_DELAY: Final = 0.5
# After a long outage of something that a model needs, its next retry comes within this time.
_LONGEST_DELAY: Final = 60.0
NORMAL_AT_ONCE: Final = 8
BUSY_AT_ONCE: Final = 2
"""Number of normal keys that are processed at a time, and while the API server is busy: its answers to everyone would
take longer with more. Beside an urgent key it is half of that: a user who edits one model again and again must not stop
all other models."""
SLOW_SECONDS: Final = 2.0
"""Time after which a key counts no more: it waits for something, as for an admission webhook that does not
answer, and the others must not wait for it."""


class _Work(NamedTuple):
    since: float
    urgent: bool
    slow: bool = False


class WorkQueue(Generic[Key]):
    """Used from one event loop. Workers that wait for a key are cancelled all together or not at all."""

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        """`is_busy` tells whether the API server is."""
        self._is_busy = is_busy
        self.adds = 0
        self.retries = 0
        # Dicts keep the order of their keys. A key is in at most one of these three.
        self._urgent: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}
        self._again: dict[Key, bool] = {}
        self._processing: dict[Key, _Work] = {}
        self._workers: deque[asyncio.Future[None]] = deque()
        # With the time at which each is due: uvloop's handle of a timer without a delay does not know it.
        self._timers: dict[Key, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[Key, int] = {}

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._urgent) + len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if no key waits for a worker or is processed; keys may be due later."""
        return not self.depth and not self._processing

    def longest_running(self) -> float:
        """Seconds since a worker got the oldest of the keys that are processed; 0 without one."""
        return _now() - min((work.since for work in self._processing.values()), default=_now())

    def add(self, key: Key, urgent: bool = False) -> None:
        self.adds += 1
        if key in self._processing:
            self._again[key] = urgent or self._again.get(key, False)
        else:
            self._put(key, urgent)

    def add_after(self, key: Key, seconds: float) -> None:
        """Add the key after this time, unless it is due earlier."""
        due = _now() + seconds
        if key in self._timers:
            earlier, timer = self._timers[key]
            if earlier <= due:
                return
            timer.cancel()
        self._timers[key] = due, asyncio.get_running_loop().call_at(due, self._add_due, key)

    def retry(self, key: Key) -> None:
        """Add the key again after a delay that doubles with each of its failures."""
        self.retries += 1
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The bound of the exponent keeps the float finite.
        delay = min(_FIRST_DELAY * 2 ** min(failures, 16), _LONGEST_DELAY)
        self.add_after(key, delay * random.uniform(0.8, 1.2))

    def forget(self, key: Key) -> None:
        """Reset the key's failures."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The next key. The worker must call `done` with it, also after an error."""
        while (lane := self._next_lane()) is None:
            worker = asyncio.get_running_loop().create_future()
            self._workers.append(worker)
            await worker
        key = next(iter(lane))
        del lane[key]
        work = self._processing[key] = _Work(_now(), urgent=lane is self._urgent)
        asyncio.get_running_loop().call_later(SLOW_SECONDS, self._set_slow, key, work)
        return key

    def done(self, key: Key) -> None:
        del self._processing[key]
        if key in self._again:
            self._put(key, self._again.pop(key))
        # Keys that were held back may be processed now.
        self._wake(len(self._waiting))

    def close(self) -> None:
        """Drop the timers. No key may be added afterwards."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _next_lane(self) -> dict[Key, None] | None:
        """The keys that the next one is taken from; None while no key may be processed."""
        if self._urgent:
            return self._urgent
        if not self._waiting:
            return None
        urgent = [work.urgent for work in self._processing.values() if not work.slow]
        limit = BUSY_AT_ONCE if self._is_busy() else NORMAL_AT_ONCE
        return self._waiting if urgent.count(False) < (limit // 2 if any(urgent) else limit) else None

    def _set_slow(self, key: Key, work: _Work) -> None:
        if self._processing.get(key) is work:
            self._processing[key] = work._replace(slow=True)
            self._wake(len(self._waiting))

    def _wake(self, count: int) -> None:
        """Let this many workers look for a key."""
        for _ in range(min(count, len(self._workers))):
            worker = self._workers.popleft()
            if not worker.done():
                worker.set_result(None)

    def _put(self, key: Key, urgent: bool) -> None:
        if key in self._urgent:
            return
        if urgent:
            self._waiting.pop(key, None)
        (self._urgent if urgent else self._waiting)[key] = None
        self._wake(1)

    def _add_due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
