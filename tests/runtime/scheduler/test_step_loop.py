"""The step loop measures steps, and launches the next one in time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minisgl.scheduler.step_times import StepWork
from minisgl.wire.plan import StepPlan
from support.scheduling import Harness

DECODE, PROMPT = 0.010, 0.050


def seconds(plan: StepPlan) -> float:
    return PROMPT if len(plan.prefill_slots) else DECODE


def running(*, overlap: bool = True, rows: int = 8, step_seconds: Callable[[StepPlan], float] = seconds) -> Harness:
    """A request that decodes, and whose last steps were measured."""
    driven = Harness(overlap=overlap, rows=rows, step_seconds=step_seconds)
    driven.submit([1, 2, 3], 60, ignore_eos=True)
    for _ in range(40):
        driven.step()
    return driven


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_measured(overlap: bool) -> None:
    driven = running(overlap=overlap)
    times = driven.scheduler.times
    prompt = driven.timed.durations[0][0]
    assert times.decode_seconds == pytest.approx(DECODE)
    assert times.costs.seconds(StepWork.of(prompt, ())) == pytest.approx(PROMPT, rel=0.01)


def test_the_next_launch_waits_while_the_device_is_busy() -> None:
    driven = running()
    spare = driven.loop.spare_ms()
    assert 7 <= spare <= 8
    driven.timed.now += spare / 1000
    assert driven.loop.spare_ms() == 0
    began = driven.timed.now
    driven.step()
    assert driven.timed.now - began == pytest.approx(DECODE - spare / 1000), "the device did not wait"


def test_a_request_that_arrives_meanwhile_is_part_of_the_next_step() -> None:
    driven = running()
    driven.timed.now += driven.loop.spare_ms() / 1000
    driven.submit([4, 5], 4)
    driven.step()
    plan, _ = driven.timed.durations[-1]
    assert len(plan.prefill_slots) == 1


def test_nothing_waits_without_a_reason() -> None:
    assert running(overlap=False).loop.spare_ms() == 0, "nothing runs between steps"
    assert running(rows=1).loop.spare_ms() == 0, "no request can join"
    idle = Harness()
    assert idle.loop.spare_ms() == 0
    idle.submit([1, 2, 3], 4)
    assert idle.loop.spare_ms() == 0


def test_steps_are_launched_at_once_after_the_device_had_to_wait() -> None:
    """A step was shorter than expected: until steps are measured anew, expectations are not trusted."""
    short = [False]
    driven = running(step_seconds=lambda plan: DECODE / 2 if short[0] else seconds(plan))
    short[0] = True
    driven.timed.now += driven.loop.spare_ms() / 1000
    driven.step()
    driven.timed.now += driven.loop.spare_ms() / 1000
    driven.step()
    for _ in range(8):
        assert driven.loop.spare_ms() == 0
        driven.step()
