"""Host time of the steps of a workload without a profiler: `python benchmarks/host_times.py MODEL [WORKLOAD …]`.

Each line is a group of steps by kind and number of decode rows, with medians in µs: `plan`, `launch` and `complete` are
host work, `wait` is the time that the host waits for the device, `step` is from one launch to the next. Steps without
`wait` are bound by the host. The last line of a workload has the sum over all steps of each column in seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.offline import LLM

COLUMNS = ("plan", "launch", "wait", "complete", "step")


class Times:
    """Times of the parts of each step, by the step's kind."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[tuple[str, dict[str, float]]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._plan = 0.0
        self._last = time.perf_counter()
        scheduler, engine = llm._scheduler, llm._engine
        for owner, name, column in (
            (scheduler, "plan", "plan"),
            (engine, "launch", "launch"),
            (engine, "collect", "wait"),
            (scheduler, "complete", "complete"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), column))

    def _timed(self, call: Callable[..., Any], column: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            if column == "launch":
                self._begin_step(args[0], began)
            result = call(*args)
            took = (time.perf_counter() - began) * 1e6
            if column == "plan":
                # It belongs to the step that is launched next.
                self._plan = took
            else:
                self._now[column] += took
            return result

        return timed

    def _begin_step(self, plan: Any, now: float) -> None:
        self._now["step"] = (now - self._last) * 1e6
        self._last = now
        rows = len(plan.decode_slots)
        kind = "with prompts" if len(plan.prefill_slots) else f"{(rows + 31) // 32 * 32:4} rows"
        self._now = defaultdict(float, plan=self._plan)
        self.steps.append((kind, self._now))

    def report(self, title: str) -> None:
        groups: dict[str, list[dict[str, float]]] = defaultdict(list)
        for kind, times in self.steps:
            groups[kind].append(times)
        print(title)
        for kind, steps in sorted(groups.items()):
            line = "  ".join(f"{name} {median(step[name] for step in steps):8.0f}" for name in COLUMNS)
            print(f"  {kind:>12}  {len(steps):5} steps  {line}")
        totals = "  ".join(f"{name} {sum(step[name] for _, step in self.steps) / 1e6:.2f}" for name in COLUMNS)
        print(f"  seconds: {totals}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a config.json, or a built-in configuration")
    parser.add_argument("workloads", nargs="*", default=["A"], help="default: A")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = args.model
        if args.model in BUILTIN_CONFIGS and not Path(args.model).exists():
            (Path(folder) / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[args.model]))
            directory = folder
        with LLM(directory, detokenize=False, dummy_weights=True) as llm:
            times = Times(llm)
            for name in args.workloads:
                make = WORKLOADS[name]
                for seed, longest in ((1, 16), (0, None)):
                    workload = make(Sizes(), llm.limits.vocab_size, seed)
                    times.steps.clear()
                    llm.generate(workload.prompts, workload.params(longest_output=longest))
                times.report(f"{args.model}, workload {name}")


if __name__ == "__main__":
    main()
