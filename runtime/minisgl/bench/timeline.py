"""What the GPU did, moment by moment: a trace in Chrome's format, and how long it had nothing to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Busy(msgspec.Struct, frozen=True):
    """Times in microseconds."""

    span: float
    """From the beginning of the first piece of work to the end of the last."""
    busy: float
    gaps: int
    longest_gap: float

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span if self.span else 0.0


def busy(work: Sequence[tuple[float, float]]) -> Busy:
    """Of pieces of work, (begin, end) in microseconds, in any order; those that overlap count once."""
    if not work:
        return Busy(0.0, 0.0, 0, 0.0)
    ordered = sorted(work)
    first, until = ordered[0][0], ordered[0][0]
    total, gaps, longest = 0.0, 0, 0.0
    for begin, end in ordered:
        if begin > until:
            gaps += 1
            longest = max(longest, begin - until)
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Busy(until - first, total, gaps, longest)


@contextmanager
def traced(path: Path, device: str) -> Iterator[list[Busy]]:
    """Write a trace of what happens inside to `path`; what the device's time was spent on is in the list after it."""
    from torch._C._autograd import DeviceType
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    found: list[Busy] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    # The engine has threads of its own.
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        yield found
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    events = [event for event in profiler.events() or () if event.device_type == kind]
    found.append(busy([(event.time_range.start, event.time_range.end) for event in events]))
