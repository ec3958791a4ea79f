"""Kernels of a decode step by time, from a trace of `minisgl bench offline --trace`:
`python benchmarks/trace_kernels.py TRACE [--top N]`.

A replay of a CUDA graph is one step; all kernels of a replay have one correlation number. Steps are grouped by their
number of rows. The first line of a group has medians over its steps, in µs: `span` from the first kernel to the end of
the last one, `busy` without the gaps between kernels, and `next` from the end of a step to the begin of the following
one. Each kernel's line has the number of its launches in a step, their total time, and the median of one launch.
Kernels that start early overlap the end of the previous one, so their total may exceed `busy`. The last group holds all
work outside graphs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from minisgl.bench.device_trace import utilization

_FEWEST_KERNELS = 16
"""Kernels with one correlation number that make it a replay."""


class Kernel(NamedTuple):
    name: str
    begin: float
    end: float
    correlation: int
    grid: tuple[int, ...]


def read(path: Path) -> list[Kernel]:
    """Work of the device in order of its begin."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = [
        Kernel(
            _short(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            int(event["args"].get("correlation", -1)),
            tuple(event["args"].get("grid", ())),
        )
        for event in _events(json.loads(raw))
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def _events(trace: Any) -> list[Any]:
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [event for event in trace["traceEvents"] if event.get("cat") in kinds and event.get("ph") == "X"]


def _short(name: str) -> str:
    name = re.sub(r"\(.*", "", name.removeprefix("void "))
    return name if len(name) <= 78 else name[:75] + "..."


def rows_of(step: list[Kernel]) -> int:
    """Rows of a step, padding included: the sampler has one program per row."""
    return next((kernel.grid[0] for kernel in step if kernel.name == "_sample_row"), 0)


def report(title: str, steps: list[list[Kernel]], follows: list[float], top: int) -> None:
    spans = [step[-1].end - step[0].begin for step in steps]
    busy = [utilization([(kernel.begin, kernel.end) for kernel in step]).busy for step in steps]
    print(
        f"{title}: {len(steps)} steps, span {median(spans):.0f}, busy {median(busy):.0f}, "
        f"next {median(follows) if follows else 0.0:.0f}, {median(map(len, steps)):.0f} launches"
    )
    durations: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for kernel in step:
            durations[kernel.name].append(kernel.end - kernel.begin)
    order = sorted(durations, key=lambda name: sum(durations[name]), reverse=True)
    for name in order[:top]:
        times = durations[name]
        print(
            f"  {len(times) / len(steps):6.1f} x {median(times):8.2f} = {sum(times) / len(steps):9.1f} us  {name}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--top", type=int, default=14, help="kernels of a group (default: 14)")
    parser.add_argument("--fewest-steps", type=int, default=8, help="least steps of a reported group (default: 8)")
    args = parser.parse_args()
    by_launch: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in read(args.trace):
        by_launch[kernel.correlation].append(kernel)
    replays = sorted((s for s in by_launch.values() if len(s) >= _FEWEST_KERNELS), key=lambda step: step[0].begin)
    groups: dict[int, list[list[Kernel]]] = defaultdict(list)
    follows: dict[int, list[float]] = defaultdict(list)
    for step, after in zip(replays, [*replays[1:], None], strict=True):
        groups[rows_of(step)].append(step)
        if after is not None:
            follows[rows_of(step)].append(after[0].begin - step[-1].end)
    for rows, steps in sorted(groups.items()):
        if len(steps) >= args.fewest_steps:
            report(f"{args.trace.name}: {rows} rows", steps, follows[rows], args.top)
    outside = [kernel for step in by_launch.values() if len(step) < _FEWEST_KERNELS for kernel in step]
    if outside:
        outside.sort(key=lambda kernel: kernel.begin)
        report(f"{args.trace.name}: outside of graphs", [outside], [], args.top)


if __name__ == "__main__":
    main()
