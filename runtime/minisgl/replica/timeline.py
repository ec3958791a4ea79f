"""How long each part of a start took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STAGES: Final = ("reap", "join", "start", "rendezvous", "load", "serve")
"""The old processes are gone; all pods are there; the new processes run our code; they have met; weights and KV pool
are there; requests can be served. A part is named after what it leads to."""


class Timeline:
    """Begins with a failure, or with the launcher's own start."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._reached: list[float] = []

    @property
    def complete(self) -> bool:
        return len(self._reached) == len(STAGES)

    def reach(self, stage: str, now: float) -> None:
        """`stage`, and with it all before it that were not seen."""
        missing = STAGES.index(stage) + 1 - len(self._reached)
        self._reached += [now] * max(0, missing)

    def seconds(self) -> dict[str, float]:
        """Of each part that is over; `total` once all are."""
        begins = (self.began, *self._reached)
        parts = {stage: round(end - begin, 3) for stage, begin, end in zip(STAGES, begins, self._reached, strict=False)}
        return {**parts, "total": round(self._reached[-1] - self.began, 3)} if self.complete else parts


def stage_of(ranks: Sequence[tuple[bool, str]]) -> str | None:
    """What all ranks of a start have reached, by (is it ready, its progress) of each."""
    reached = min((_rank_stage(ready, progress) for ready, progress in ranks), default=0)
    return None if reached == 0 else STAGES[reached]


def _rank_stage(ready: bool, progress: str) -> int:
    if ready:
        return STAGES.index("serve")
    words = progress.partition(" ")[0]
    match words:
        case "starting":
            return 0
        case "rendezvous":
            return STAGES.index("start")
        case "weights":
            return STAGES.index("rendezvous")
    return STAGES.index("load")
