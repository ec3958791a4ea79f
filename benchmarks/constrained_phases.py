"""Host time of the parts of a step with constrained rows."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean, median, quantiles
from typing import Any

from minisgl.offline import LLM


class Phases:
    """Times of the parts of all steps, from now on.

    `masks` is the time from the result of a step until the masks of the next one are published, `step` that from one
    result to the next. `fill` runs on a thread of its own, beside `plan` and `launch`.
    """

    def __init__(self, llm: LLM) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)
        self._collected = 0.0
        """Time of the last result; 0 before the first one."""
        scheduler, engine, loop = llm._scheduler, llm._engine, llm._loop
        parts: list[tuple[Any, str, str]] = [
            (scheduler, "plan", "plan"),
            (engine, "launch", "launch"),
            (engine, "collect", "wait for the device"),
            (scheduler, "complete", "process the result"),
            (scheduler, "_consume", "of it, consume"),
            (loop, "_fill_masks", "begin to fill"),
            (loop._thread, "start", "of it, hand over"),
            (scheduler, "fill_masks", "fill"),
            (engine, "sample", "sample"),
            (loop._thread, "join", "wait for masks"),
        ]
        for owner, name, part in parts:
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            ended = time.perf_counter()
            self._times[part].append(ended - began)
            if part == "wait for the device":
                if self._collected:
                    self._times["step"].append(ended - self._collected)
                self._collected = ended
            elif part == "sample" and self._collected:
                self._times["masks"].append(ended - self._collected)
            return result

        return timed

    def report(self, title: str) -> None:
        """Print mean, median and 90th percentile of each part since the last report, in ms."""
        print(title, file=sys.stderr)
        for part, seconds in self._times.items():
            if len(seconds) > 1:
                figures = (fmean(seconds), median(seconds), quantiles(seconds, n=10)[-1])
                line = "  ".join(f"{1e3 * figure:7.3f}" for figure in figures)
                print(f"  {part:>20}  {len(seconds):5}  {line}", file=sys.stderr)
        self._times.clear()
        self._collected = 0.0
