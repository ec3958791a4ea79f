"""Trace of the device's work in Chrome's format, and how long the device was idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Utilization(msgspec.Struct, frozen=True):
    """Busy and idle time of a device, in microseconds."""

    span: float
    """From the beginning of the first interval to the end of the last one."""
    busy: float
    gaps: int
    longest_gap: float

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span if self.span else 0.0


def utilization(intervals: Sequence[tuple[float, float]]) -> Utilization:
    """Merge (begin, end) of the device's work, in microseconds and any order; overlapping work counts once."""
    if not intervals:
        return Utilization(0.0, 0.0, 0, 0.0)
    ordered = sorted(intervals)
    first, until = ordered[0][0], ordered[0][0]
    total, gaps, longest = 0.0, 0, 0.0
    for begin, end in ordered:
        if begin > until:
            gaps += 1
            longest = max(longest, begin - until)
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Utilization(until - first, total, gaps, longest)


@contextmanager
def trace_device(path: Path, device: str) -> Iterator[list[Utilization]]:
    """Write a trace of the block to `path`; after the block, the list holds the utilization of `device`."""
    from torch._C._autograd import DeviceType
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    found: list[Utilization] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    # The engine has threads of its own.
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        yield found
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    events = [event for event in profiler.events() or () if event.device_type == kind]
    found.append(utilization([(event.time_range.start, event.time_range.end) for event in events]))
