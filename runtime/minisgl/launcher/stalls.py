"""Decide which processes of a group hang, from their heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from minisgl.launcher.control import Heartbeat
from minisgl.launcher.heartbeat import HEARTBEAT_SECONDS, MAX_GAP_SECONDS

_SILENT_SECONDS: Final = 5 * HEARTBEAT_SECONDS
"""Time without a heartbeat after which the silence is named as the symptom, and not the age of the step."""


class Watched(Protocol):
    """A process as this module sees it."""

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The last one; another object for each. None: it sends none."""
        ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def alive(self) -> bool: ...

    stall: str
    """Why it hangs; empty: it does not."""


@dataclass(slots=True)
class _Progress:
    """Current step of a process, as it was last reported. Times in seconds."""

    heartbeat: Heartbeat
    silence: float = 0.0
    """Time since its last heartbeat."""


class StallMonitor:
    """Sets `stall` of ready processes whose step, or whose silence, is longer than `limit` seconds.

    Time in which the monitor's own process did not run does not count."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._now = now
        self._progress: dict[Watched, _Progress] = {}

    def update(self, processes: Iterable[Watched], now: float) -> None:
        """Take over the heartbeats that have arrived until `now`. Call it every second or so."""
        passed = min(now - self._now, MAX_GAP_SECONDS)
        self._now = now
        for process in processes:
            if process.heartbeat is None or not process.is_ready or not process.alive:
                continue
            progress = self._progress.get(process)
            if progress is None or progress.heartbeat is not process.heartbeat:
                self._progress[process] = progress = _Progress(process.heartbeat)
            else:
                progress.silence += passed
            process.stall = self._stall(progress)

    def _stall(self, progress: _Progress) -> str:
        age = progress.heartbeat.step_age + progress.silence
        if age <= self._limit:
            return ""
        if progress.silence > _SILENT_SECONDS:
            return (
                f"it has sent no heartbeat for {progress.silence:.0f} s: it is stopped, or a library call keeps "
                "Python's interpreter lock"
            )
        return f"a step has not finished for {age:.0f} s"
