"""Runs a scheduler's plans on an engine, one step ahead of the results when steps overlap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any, Final

import msgspec

from minisgl.engine.interface import Engine
from minisgl.scheduler.constrained import ConstrainedRows, Consuming
from minisgl.scheduler.constraints import Constraint, ConstraintError, note_open
from minisgl.scheduler.mask_thread import MaskThread
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.scheduler.step_times import StepWork
from minisgl.wire.plan import IntArray, StepPlan, StepResult

_WAITED: Final = 100e-6
"""Shortest time in `collect` that was spent waiting for the device, in seconds."""
_LONG_LAUNCH: Final = 3e-3
"""A launch that takes longer is one kernel by kernel, or captures a graph; a graph takes up to 1.5 ms."""
_LAUNCH_AHEAD: Final = 1.5e-3
_LAUNCH_TEXTS_AHEAD: Final = 5e-3
"""The same for texts that are pooled: planning a step that dozens of them join takes milliseconds."""
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
    captured: bool
    """The launch captured its CUDA graph first."""
    constrained_rows: int
    """Rows that need masks."""

    @property
    def is_slow(self) -> bool:
        return self.launched - self.began > _LONG_LAUNCH


class _Filling(msgspec.Struct):
    """Masks of the oldest step that is not collected, while other threads fill them."""

    step: _Launched
    masks: IntArray
    is_queued: bool
    """The thread that ends last also calls `Engine.sample`, for which the device waits."""
    begun: Collection[int] = ()
    """Open rows, whose masks another thread fills than those of the others."""
    rows: ConstrainedRows = ConstrainedRows((), ())
    """All rows, once they are known."""
    errors: dict[int, ConstraintError] = {}
    refused: Sequence[tuple[Request, ConstraintError]] = ()
    """Requests whose matchers refused the tokens before these masks."""
    unfilled: int = 1
    """Threads that still fill masks."""


class StepLoop:
    """Launches plans and completes results, in order.

    Without overlap a step is launched when the result of the one before is complete. With overlap step n + 1 is
    launched before the result of step n is read, so that planning and bookkeeping hide behind the device.

    Rows with a constraint need the tokens of step n for their masks in step n + 1. Their model runs meanwhile; once the
    result of step n is there, a thread lets matchers consume its tokens and fills the masks with which step n + 1 is
    sampled. Where the sampling is queued already and the device waits for the masks, step n + 2 is planned and launched
    at the same time; and masks that probably take long are begun by another thread, before the tokens of other rows are
    consumed."""

    def __init__(self, scheduler: Scheduler, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds; it measures steps."""
        self.scheduler = scheduler
        self.engine = engine
        self._constrained = scheduler.constrained
        self._clock = clock
        self._ahead = 1 if scheduler.config.overlap else 0
        self._pending: deque[_Launched] = deque()
        self._ended = 0.0
        """Time at which the last collected step ended on the device."""
        self._ended_unseen = False
        """It was an earlier time."""
        self._distrust = 0
        self._thread = MaskThread()
        self._open_thread = MaskThread()
        self._lock = Lock()
        """Of `_Filling.unfilled`."""
        self._filling: _Filling | None = None

    def spare_ms(self) -> int:
        """Whole milliseconds for which the next launch can wait without making the device wait. A request that arrives
        by then is part of the next step, instead of the one after it."""
        if len(self._pending) != 1 or self._distrust or not self.scheduler.may_wait:
            return 0
        running, times = self._pending[0], self.scheduler.times
        ahead, expected = _LAUNCH_AHEAD, times.decode_seconds
        if running.work.tokens:
            if self.scheduler.config.pooling is None:
                # Its time is less certain.
                return 0
            ahead, expected = _LAUNCH_TEXTS_AHEAD, times.least_prompt_seconds(running.work)
        ends = max(running.began, self._ended) + expected
        launch_at = ends - max(ahead, _LAUNCH_AHEAD_SHARE * expected)
        return max(int((launch_at - self._clock()) * 1000), 0)

    def step(self) -> StepOutput | None:
        """Launch the next step, if any, and complete the oldest one that is due; None when no step was due and there is
        nothing else to tell clients."""
        plan = self.scheduler.plan()
        if plan is not None:
            if self._filling is not None and not self._overlaps(self._filling, plan):
                self._finish_filling(self._filling)
            captures, began = self.engine.stats.captures, self._clock()
            handle = self.engine.launch(plan)
            captured = self.engine.stats.captures != captures
            work = StepWork.of(plan, self.scheduler.config.step_graphs)
            self._pending.append(
                _Launched(handle, work, began, self._clock(), captured, self._constrained.num_launched)
            )
            if len(self._pending) == 1:
                self._fill_masks(self._pending[0])
        if not self._pending:
            self._constrained.wait(_COMPILE_WAIT)
        if not self._pending or (plan is not None and len(self._pending) <= self._ahead):
            return self.scheduler.take_notices()
        if self._filling is not None:
            self._finish_filling(self._filling)
        step = self._pending.popleft()
        called = self._clock()
        result = self.engine.collect(step.handle)
        self._measure(step, called, self._clock())
        if not self._pending:
            return self.scheduler.output(self.scheduler.advance(result))
        return self._advance(result, self._pending[0])

    def _advance(self, result: StepResult, following: _Launched) -> StepOutput:
        """Advance requests by a result, and begin to fill the masks of the step that follows."""
        if following.constrained_rows <= _FEW_MASKS:
            output = self.scheduler.output(self.scheduler.advance(result))
            self._fill_masks(following)
            return output
        self._thread.wake()
        filling = self._new_filling(following)

        def begin(rows: Mapping[int, Constraint]) -> None:
            filling.unfilled = 2
            self._open_thread.start(lambda: self._fill_open(filling, rows))
            filling.begun = rows.keys()

        try:
            advanced = self.scheduler.advance(result, begin if filling.is_queued else None, consume=False)
            self._fill_others(filling, advanced.consuming)
        except BaseException:
            if filling.begun:
                self._open_thread.join()
            raise
        return self.scheduler.output(advanced)

    def _fill_masks(self, step: _Launched) -> None:
        """Begin to fill the masks of the newest step, if it has constrained rows and all earlier results are
        complete."""
        if not step.constrained_rows:
            return
        if step.constrained_rows > _FEW_MASKS:
            self._fill_others(self._new_filling(step))
            return
        rows, masks = self._constrained.launched_rows(), self.engine.mask_memory(step.constrained_rows)
        errors = self._constrained.fill_masks(dict(enumerate(rows.constraints)), masks)
        self.scheduler.fail((rows.requests[row], error) for row, error in errors.items())
        self.engine.sample(step.handle, masks)

    def _new_filling(self, step: _Launched) -> _Filling:
        return _Filling(step, self.engine.mask_memory(step.constrained_rows), self.engine.waits_for_masks(step.handle))

    def _fill_open(self, filling: _Filling, rows: Mapping[int, Constraint]) -> None:
        try:
            filling.errors.update(self._constrained.fill_masks(rows, filling.masks, slow=True))
        finally:
            # Else a launch that waits for the masks would never return, and the exception never be raised.
            self._end_filling(filling)

    def _fill_others(self, filling: _Filling, consuming: Consuming | None = None) -> None:
        """Begin to fill the masks of the rows that are not begun, after their matchers have consumed these tokens."""
        filling.rows = self._constrained.launched_rows()
        others = dict(enumerate(filling.rows.constraints))
        for row in filling.begun:
            del others[row]

        def fill() -> None:
            try:
                if consuming is not None:
                    filling.refused = self._constrained.consume(consuming)
                filling.errors.update(self._constrained.fill_masks(others, filling.masks))
            finally:
                self._end_filling(filling)

        self._thread.start(fill)
        self._filling = filling

    def _end_filling(self, filling: _Filling) -> None:
        """Let the device sample when all threads have filled their masks."""
        with self._lock:
            filling.unfilled -= 1
            is_filled = not filling.unfilled
        if is_filled and filling.is_queued:
            self.engine.sample(filling.step.handle, filling.masks)
            # While the device samples, for the next step.
            note_open(filling.rows.constraints, filling.masks)

    @staticmethod
    def _overlaps(filling: _Filling, plan: StepPlan) -> bool:
        """Whether a step may be launched while masks of the step before are filled. Steps with prompts may allocate
        memory or load kernels, which waits for the device, and the device waits for the masks."""
        return filling.is_queued and not len(plan.prefill_slots)

    def _finish_filling(self, filling: _Filling) -> None:
        """Wait for the masks, and sample their step unless the thread has done so."""
        self._filling = None
        try:
            self._thread.join()
        finally:
            if filling.begun:
                self._open_thread.join()
        if filling.refused or filling.errors:
            self.scheduler.fail(filling.refused)
            self.scheduler.fail((filling.rows.requests[row], error) for row, error in filling.errors.items())
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
            if not step.work.tokens:
                # The step after one with prompts is launched at once.
                self._distrust = _DISTRUST_STEPS
            if following is not None and following.is_slow:
                if not step.is_slow:
                    self._ended = following.began
                    return
                self._ended_unseen = True
        if self._ended_unseen == was_unseen and not step.captured:
            began = before if was_unseen else max(step.began, before)
            self.scheduler.times.observe(step.work, self._ended - began)
