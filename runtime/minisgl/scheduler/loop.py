"""Runs a scheduler's plans on an engine, one step ahead of the results when steps overlap."""

from __future__ import annotations

from collections import deque
from typing import Any

from minisgl.engine.interface import Engine
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput


class StepLoop:
    """Launches plans and completes results, in order.

    Without overlap a step is launched when the result of the one before is complete. With overlap step n + 1 is
    launched before the result of step n is read, so that planning and bookkeeping hide behind the device."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self._ahead = 1 if scheduler.config.overlap else 0
        self._pending: deque[Any] = deque()

    def step(self) -> StepOutput | None:
        """Launch the next step, if any, and complete the oldest one that is due; None when no step was due."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._pending.append(self.engine.launch(plan))
        if not self._pending or (plan is not None and len(self._pending) <= self._ahead):
            return None
        return self.scheduler.complete(self.engine.collect(self._pending.popleft()))
