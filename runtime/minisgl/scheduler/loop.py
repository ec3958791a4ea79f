"""Runs a scheduler's plans on an engine, one step ahead of the results when steps overlap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from minisgl.engine.interface import Engine
from minisgl.scheduler.constraints import ConstraintError, LateRows
from minisgl.scheduler.mask_thread import MaskThread
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.scheduler.step_times import StepWork
from minisgl.wire.plan import IntArray, StepPlan

_WAITED: Final = 100e-6
"""Shortest time in `collect` that was spent waiting for the device, in seconds."""
_LONG_LAUNCH: Final = 3e-3
"""A launch that takes longer is one kernel by kernel; a graph takes up to 1.5 ms."""
_LAUNCH_AHEAD: Final = 1.5e-3
_LAUNCH_AHEAD_SHARE: Final = 0.15
"""A step is launched this long, or this share of the running step, before the running one is expected to end."""
_COMPILE_WAIT: Final = 1e-3
"""Longest wait for a grammar while there is nothing else to do, in seconds."""
_FEW_MASKS: Final = 4
"""Masks that take less time than waking a thread for them."""
_DISTRUST_STEPS: Final = 32
"""Steps that are launched at once after the device had to wait for a launch: their times are measured anew."""


class _Launched(msgspec.Struct, frozen=True):
    handle: Any
    work: StepWork
    began: float
    """Time before the launch, in seconds."""
    launched: float
    """Time after it."""
    late_rows: int
    """Rows that need masks."""

    @property
    def is_slow(self) -> bool:
        return self.launched - self.began > _LONG_LAUNCH


class _Filling(msgspec.Struct):
    """Masks of the oldest step that is not collected, while another thread fills them."""

    step: _Launched
    rows: LateRows
    masks: IntArray
    is_queued: bool
    """The thread also calls `Engine.sample`, for which the device waits."""
    errors: dict[int, ConstraintError] = {}


class StepLoop:
    """Launches plans and completes results, in order.

    Without overlap a step is launched when the result of the one before is complete. With overlap step n + 1 is
    launched before the result of step n is read, so that planning and bookkeeping hide behind the device.

    Rows with a constraint need the tokens of step n for their masks in step n + 1. Their model runs meanwhile; once the
    result of step n is complete, a thread fills the masks with which step n + 1 is sampled. Where the sampling is
    queued already and the device waits for the masks, step n + 2 is planned and launched at the same time."""

    def __init__(self, scheduler: Scheduler, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds; it measures steps."""
        self.scheduler = scheduler
        self.engine = engine
        self._clock = clock
        self._ahead = 1 if scheduler.config.overlap else 0
        self._pending: deque[_Launched] = deque()
        self._ended = 0.0
        """Time at which the last collected step ended on the device."""
        self._ended_unseen = False
        """It was an earlier time."""
        self._distrust = 0
        self._thread = MaskThread()
        self._filling: _Filling | None = None

    def spare_ms(self) -> int:
        """Whole milliseconds for which the next launch can wait without making the device wait. A request that arrives
        by then is part of the next step, instead of the one after it."""
        if len(self._pending) != 1 or self._distrust or not self.scheduler.may_wait:
            return 0
        running = self._pending[0]
        if running.work.tokens:
            # Its time is less certain.
            return 0
        expected = self.scheduler.times.decode_seconds
        ends = max(running.began, self._ended) + expected
        launch_at = ends - max(_LAUNCH_AHEAD, _LAUNCH_AHEAD_SHARE * expected)
        return max(int((launch_at - self._clock()) * 1000), 0)

    def step(self) -> StepOutput | None:
        """Launch the next step, if any, and complete the oldest one that is due; None when no step was due and there is
        nothing else to tell clients."""
        plan = self.scheduler.plan()
        if plan is not None:
            if self._filling is not None and not self._overlaps(self._filling, plan):
                self._finish_filling(self._filling)
            began = self._clock()
            handle = self.engine.launch(plan)
            work = StepWork.of(plan, self.scheduler.config.step_graphs)
            self._pending.append(_Launched(handle, work, began, self._clock(), self.scheduler.num_late_rows))
            if len(self._pending) == 1:
                self._fill_masks(self._pending[0])
        if not self._pending:
            self.scheduler.wait_for_grammars(_COMPILE_WAIT)
        if not self._pending or (plan is not None and len(self._pending) <= self._ahead):
            return self.scheduler.take_notices()
        if self._filling is not None:
            self._finish_filling(self._filling)
        step = self._pending.popleft()
        called = self._clock()
        result = self.engine.collect(step.handle)
        self._measure(step, called, self._clock())
        output = self.scheduler.complete(result)
        if self._pending:
            self._fill_masks(self._pending[0])
        return output

    def _fill_masks(self, step: _Launched) -> None:
        """Begin to fill the masks of the newest step if it has late rows, when all earlier results are complete."""
        if not step.late_rows:
            return
        rows, masks = self.scheduler.late_rows(), self.engine.mask_memory(step.late_rows)
        if step.late_rows <= _FEW_MASKS:
            self.scheduler.fail_late(rows, self.scheduler.fill_masks(rows, masks))
            self.engine.sample(step.handle, masks)
            return
        self._filling = filling = _Filling(step, rows, masks, self.engine.waits_for_masks(step.handle))

        def fill() -> None:
            filling.errors = self.scheduler.fill_masks(filling.rows, filling.masks)
            if filling.is_queued:
                self.engine.sample(filling.step.handle, filling.masks)

        self._thread.start(fill)

    @staticmethod
    def _overlaps(filling: _Filling, plan: StepPlan) -> bool:
        """Whether a step may be launched while masks of the step before are filled. Steps with prompts may allocate
        memory or load kernels, which waits for the device, and the device waits for the masks."""
        return filling.is_queued and not len(plan.prefill_slots)

    def _finish_filling(self, filling: _Filling) -> None:
        """Wait for the masks, and sample their step unless the thread has done so."""
        self._filling = None
        self._thread.join()
        self.scheduler.fail_late(filling.rows, filling.errors)
        if not filling.is_queued:
            self.engine.sample(filling.step.handle, filling.masks)

    def _measure(self, step: _Launched, called: float, returned: float) -> None:
        """Measure a step that was collected between these times.

        A step begins on the device when the one before ends, or with its launch. If `collect` waited, the step ended
        when it returned; otherwise it ended unseen, but not long ago unless the launch of the next one took long. Of
        several steps with such launches, each is measured by the time that it took the loop."""
        before, was_unseen = self._ended, self._ended_unseen
        following = self._pending[0] if self._pending else None
        self._distrust = max(self._distrust - 1, 0)
        self._ended, self._ended_unseen = called, False
        if returned - called > _WAITED:
            self._ended = returned
        else:
            self._distrust = _DISTRUST_STEPS
            if following is not None and following.is_slow:
                if not step.is_slow:
                    self._ended = following.began
                    return
                self._ended_unseen = True
        if self._ended_unseen == was_unseen:
            began = before if was_unseen else max(step.began, before)
            self.scheduler.times.observe(step.work, self._ended - began)
