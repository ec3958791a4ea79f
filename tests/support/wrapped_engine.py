"""An engine that passes everything on to another one; those derived from it watch or change some of that."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.wire.plan import IntArray, StepPlan, StepResult

E = TypeVar("E", bound=Engine)


class WrappedEngine(Generic[E]):
    def __init__(self, engine: E) -> None:
        self._engine = engine

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def launch(self, plan: StepPlan) -> Any:
        return self._engine.launch(plan)

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: Any) -> bool:
        return self._engine.waits_for_masks(handle)

    def mask_memory(self, rows: int) -> IntArray:
        return self._engine.mask_memory(rows)

    def sample(self, handle: Any, masks: IntArray) -> None:
        self._engine.sample(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self._engine.collect(handle)

    def close(self) -> None:
        self._engine.close()
