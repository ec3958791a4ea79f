"""Engine whose steps take time on a clock of its own, so that tests of step times need no real time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.wire.plan import IntArray, StepPlan, StepResult


class TimedEngine:
    """Runs steps on another engine. A step begins when the one before has ended, and lasts `seconds(plan)`."""

    def __init__(self, engine: Engine, seconds: Callable[[StepPlan], float]) -> None:
        self._engine = engine
        self._seconds = seconds
        self.now = 0.0
        """Seconds: the host's time, which passes in `collect`."""
        self._free_at = 0.0
        self.durations: list[tuple[StepPlan, float]] = []
        """All launched steps."""

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def clock(self) -> float:
        return self.now

    def launch(self, plan: StepPlan) -> tuple[Any, float]:
        seconds = self._seconds(plan)
        self.durations.append((plan, seconds))
        self._free_at = max(self._free_at, self.now) + seconds
        return self._engine.launch(plan), self._free_at

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: tuple[Any, float]) -> bool:
        return self._engine.waits_for_masks(handle[0])

    def mask_memory(self, rows: int) -> IntArray:
        return self._engine.mask_memory(rows)

    def sample(self, handle: tuple[Any, float], masks: IntArray) -> None:
        self._engine.sample(handle[0], masks)

    def collect(self, handle: tuple[Any, float]) -> StepResult:
        step, ends_at = handle
        self.now = max(self.now, ends_at)
        return self._engine.collect(step)

    def close(self) -> None:
        self._engine.close()
