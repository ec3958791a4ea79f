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
    result to the next. `fill` runs on threads of its own, beside `plan` and `launch`; it has two entries for steps with
    open rows, of which one is that of these rows.
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
            (scheduler, "advance", "advance requests"),
            (scheduler, "consume", "consume"),
            (loop._open_thread, "start", "of it, hand over open"),
            (loop, "_fill_others", "begin to fill others"),
            (loop._thread, "start", "of it, hand over"),
            (scheduler, "output", "output"),
            (scheduler, "fill_masks", "fill"),
            (loop, "_fill_open", "of it, open rows"),
            (engine, "sample", "sample"),
            (loop, "_finish_filling", "wait for masks"),
        ]
        # A tree to compare with may lack some.
        for owner, name, part in (each for each in parts if hasattr(each[0], each[1])):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **options)
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
                print(f"  {part:>22}  {len(seconds):5}  {line}", file=sys.stderr)
        self._times.clear()
        self._collected = 0.0
