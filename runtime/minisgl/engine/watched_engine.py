"""Engine whose calls in progress another thread can see: a step that hangs cannot report itself."""

from __future__ import annotations

import time
from typing import Any

from minisgl.engine.interface import Engine
from minisgl.wire.plan import IntArray, StepPlan, StepResult


class WatchedEngine:
    """Implements `interface.Engine`. After an exception the call stays in progress: the process must exit, and closing
    a broken device may hang as well."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.limits = engine.limits
        self.stats = engine.stats
        self.busy_since: float | None = None
        """Begin of the call in progress, on the monotonic clock; None: there is none. `waits_for_masks`, `mask_memory`
        and `close` do not count."""

    def launch(self, plan: StepPlan) -> Any:
        self.busy_since = time.monotonic()
        handle = self._engine.launch(plan)
        self.busy_since = None
        return handle

    def use_idle_time(self) -> bool:
        self.busy_since = time.monotonic()
        is_more = self._engine.use_idle_time()
        self.busy_since = None
        return is_more

    def waits_for_masks(self, handle: Any) -> bool:
        return self._engine.waits_for_masks(handle)

    def mask_memory(self, rows: int) -> IntArray:
        return self._engine.mask_memory(rows)

    def sample(self, handle: Any, masks: IntArray) -> None:
        if self._engine.waits_for_masks(handle):
            # Another thread may call it, during a launch. There is nothing that could hang.
            self._engine.sample(handle, masks)
            return
        self.busy_since = time.monotonic()
        self._engine.sample(handle, masks)
        self.busy_since = None

    def collect(self, handle: Any) -> StepResult:
        self.busy_since = time.monotonic()
        result = self._engine.collect(handle)
        self.busy_since = None
        return result

    def close(self) -> None:
        self._engine.close()
