"""Seconds that each stage of a start took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STAGES: Final = ("reap", "join", "start", "rendezvous", "load", "serve")
"""Each stage ends when: the old processes are reaped; all pods have joined; the new processes run our code; the ranks
have met; weights and KV pool are loaded; requests can be served."""


class StartTimings:
    """Stages of one start; it begins with a failure, or with the start of the launcher."""

    def __init__(self, began: float) -> None:
        """`began`: on the monotonic clock."""
        self.began = began
        self._reached: list[float] = []

    @property
    def complete(self) -> bool:
        return len(self._reached) == len(STAGES)

    def reached(self, stage: str, now: float) -> None:
        """Record the end of `stage`, and of all stages before it that were not recorded."""
        missing = STAGES.index(stage) + 1 - len(self._reached)
        self._reached += [now] * max(0, missing)

    def seconds(self) -> dict[str, float]:
        """Stage → seconds, for the stages that have ended; `total` once all have."""
        begins = (self.began, *self._reached)
        stages = {
            stage: round(end - begin, 3) for stage, begin, end in zip(STAGES, begins, self._reached, strict=False)
        }
        return {**stages, "total": round(self._reached[-1] - self.began, 3)} if self.complete else stages


def reached_stage(ranks: Sequence[tuple[bool, str]]) -> str | None:
    """Last stage that all ranks of a start have reached; `ranks` has (is it ready, its progress) of each."""
    reached = min((_rank_stage(ready, progress) for ready, progress in ranks), default=0)
    return None if reached == 0 else STAGES[reached]


def _rank_stage(ready: bool, progress: str) -> int:
    if ready:
        return STAGES.index("serve")
    match progress.partition(" ")[0]:
        case "starting":
            return 0
        case "rendezvous":
            return STAGES.index("start")
        case "weights":
            return STAGES.index("rendezvous")
    return STAGES.index("load")
