"""Time of one call on the device, without the launch overhead of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def microseconds(call: Callable[[int], object], calls: int) -> float:
    """Microseconds per call: median of five replays of a CUDA graph of `calls` calls, each of which gets its number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for number in range(calls):
            call(number)
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(float(begin.elapsed_time(end)))
    return sorted(times)[2] * 1e3 / calls
