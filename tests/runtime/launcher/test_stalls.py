"""Which processes count as hung, on a clock of the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from minisgl.launcher.control import Heartbeat
from minisgl.launcher.heartbeat import MAX_GAP_SECONDS, StepAge
from minisgl.launcher.stalls import StallMonitor


@dataclass(eq=False)
class _Rank:
    """A process as the monitor sees it."""

    heartbeat: Heartbeat | None = None
    is_ready: bool = True
    alive: bool = True
    stall: str = ""


class _Watched:
    """One rank, and a monitor with a limit of 10 s."""

    def __init__(self) -> None:
        self.rank = _Rank()
        self.now = 100.0
        self._monitor = StallMonitor(10.0, self.now)

    def wait(self, seconds: float) -> str:
        self.now += seconds
        self._monitor.update([self.rank], self.now)
        return self.rank.stall

    def beat(self, step_age: float, seconds: float = 1.0) -> str:
        """`seconds` later a heartbeat arrives."""
        self.rank.heartbeat = Heartbeat(step_age)
        return self.wait(seconds)


def test_an_idle_rank_that_sends_heartbeats_does_not_hang() -> None:
    watched = _Watched()
    assert [watched.beat(0.0) for _ in range(100)] == [""] * 100


def test_a_step_hangs_when_it_is_older_than_the_limit() -> None:
    watched = _Watched()
    assert [watched.beat(age) for age in (0.0, 0.9, 8.9, 9.9)] == [""] * 4
    assert watched.beat(10.9) == "a step has not finished for 11 s"
    assert watched.beat(0.3) == "", "it has finished after all"


def test_a_rank_hangs_between_two_heartbeats() -> None:
    watched = _Watched()
    assert watched.beat(9.5) == ""
    assert watched.wait(0.6) == "a step has not finished for 10 s"


def test_silence_longer_than_the_limit_is_a_hang() -> None:
    watched = _Watched()
    watched.beat(0.0)
    assert [watched.wait(1.0) for _ in range(10)] == [""] * 10
    assert watched.wait(1.0).startswith("it has sent no heartbeat for 11 s")
    assert watched.beat(0.0) == "", "it was only paused"


def test_time_in_which_the_launcher_did_not_run_does_not_count() -> None:
    watched = _Watched()
    watched.beat(2.0)
    assert watched.wait(3600.0) == "", "the machine slept"
    assert watched.wait(MAX_GAP_SECONDS) != "", "but the rank stays silent"


@pytest.mark.parametrize("rank", [_Rank(is_ready=False), _Rank(alive=False)], ids=["starting", "dead"])
def test_only_ready_processes_hang(rank: _Rank) -> None:
    watched = _Watched()
    watched.rank = rank
    watched.beat(3600.0)
    assert watched.wait(1.0) == ""


def test_a_process_without_heartbeats_never_hangs() -> None:
    watched = _Watched()
    assert [watched.wait(1.0) for _ in range(100)] == [""] * 100


class _Step:
    """The age of the steps of one process."""

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.now = 50.0
        self.cpu_seconds = 7.0
        self._age = StepAge(on_cpu=on_cpu, now=self.now, cpu_seconds=self.cpu_seconds)

    def after(self, seconds: float, since: float | None, *, cpu: float = 0.0, compiling: bool = False) -> float:
        """Return the age `seconds` later, of which `cpu` were computed."""
        self.now += seconds
        self.cpu_seconds += cpu
        return round(self._age.sample(self.now, since, self.cpu_seconds, compiling=compiling), 6)


def test_the_age_of_a_step_counts_from_its_begin() -> None:
    step = _Step()
    assert step.after(1.0, None) == 0.0
    assert [step.after(1.0, 51.25) for _ in range(3)] == [0.75, 1.75, 2.75]
    assert step.after(1.0, 54.5) == 0.5, "another step"
    assert step.after(1.0, None) == 0.0


def test_the_first_step_after_an_idle_hour_is_young() -> None:
    step = _Step()
    for _ in range(3600):
        step.after(1.0, None)
    assert step.after(1.0, step.now + 0.75) == 0.25


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    step = _Step()
    assert step.after(1.0, 50.5) == 0.5
    assert step.after(3600.0, 50.5) == 0.5 + MAX_GAP_SECONDS
    assert step.after(3600.0, 4000.0) == MAX_GAP_SECONDS, "it began before the stop"


def test_compiling_does_not_count() -> None:
    step = _Step()
    assert step.after(1.0, 50.5) == 0.5
    assert [step.after(1.0, 50.5, compiling=True) for _ in range(120)] == [0.0] * 120
    assert step.after(1.0, 50.5) == 1.0


def test_on_a_cpu_a_step_that_computes_is_only_long() -> None:
    step = _Step(on_cpu=True)
    assert [step.after(1.0, 50.5, cpu=0.9) for _ in range(120)] == [0.0] * 120
    assert [step.after(1.0, 50.5, cpu=0.001) for _ in range(3)] == [1.0, 2.0, 3.0], "now it waits"
    device = _Step()
    assert [device.after(1.0, 50.5, cpu=1.0) for _ in range(3)] == [0.5, 1.5, 2.5], "waits for a device may spin"
