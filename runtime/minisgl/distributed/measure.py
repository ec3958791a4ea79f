"""Latency and bandwidth of all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from minisgl.distributed.tensor_parallel import TensorParallel

_WARM_UPS: Final = 5
_SAMPLES: Final = 20
_CALLS_PER_GRAPH: Final = 20


class AllReduceTiming(NamedTuple):
    num_bytes: int
    seconds: float
    """Median seconds of one call."""
    algorithm_bandwidth: float
    """Message bytes per second."""
    bus_bandwidth: float
    """Bytes per second that each link carries when the algorithm is optimal: message bytes times 2 (n - 1) / n, as in
    nccl-tests, comparable with the link speed for any number of ranks."""


def measure_all_reduce(
    parallel: TensorParallel, sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[AllReduceTiming]:
    """Time messages of `sizes` bytes (rounded down to whole elements). All ranks call it with the same arguments.

    On CUDA a graph of many calls is timed, as decode steps run them; otherwise host launches would be measured.
    """
    timings = []
    for size in sizes:
        message = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype, device=parallel.device)
        measure = _measure_cuda if message.is_cuda else _measure_cpu
        seconds = measure(parallel, partial(parallel.all_reduce_sum, message))
        algorithm = message.nbytes / seconds
        bus = algorithm * 2 * (parallel.size - 1) / parallel.size
        timings.append(AllReduceTiming(message.nbytes, seconds, algorithm, bus))
    return timings


def _measure_cpu(parallel: TensorParallel, call: Callable[[], object]) -> float:
    for _ in range(_WARM_UPS):
        call()
    parallel.barrier()
    samples = []
    for _ in range(_SAMPLES):
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return median(samples)


def _measure_cuda(parallel: TensorParallel, call: Callable[[], object]) -> float:
    for _ in range(_WARM_UPS):
        call()
    parallel.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            call()
    graph.replay()
    parallel.barrier()
    event: Any = torch.cuda.Event
    samples: list[float] = []
    for _ in range(_SAMPLES):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1000 / _CALLS_PER_GRAPH)
    graph.reset()
    return median(samples)
