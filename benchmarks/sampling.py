"""Sampling on the device: `python benchmarks/sampling.py`.

Each line has µs of one call in a CUDA graph, for 1, 32, 131 and 256 rows of 151,936 bfloat16 logits, flat as those of
random weights and peaked as those of a trained model. `plain` is the sample that every row takes first; the other lines
are what rows with filters, logits processors and log-probabilities cost on top of it, with 1 µs for a copy of the plain
samples. `floor` is the time of the bytes that a pass must read at the bandwidth: the logits, and the token counts of
penalized rows. Below, the kernels of one call with 256 rows, by the profiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from graph_timing import microseconds
from minisgl.bench.roofline import hardware_of
from minisgl.kernels.sampling.resample import resample
from minisgl.kernels.sampling.resample_triton import Workspace, report_cuda
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import Samples
from support.kernels.resampling import Row, flat, make_batch, peaked

VOCABULARY = 151_936
ROWS = (1, 32, 131, 256)
CALLS = 10


@dataclass(frozen=True)
class Stage:
    row: Row
    floor_bytes: int = 2
    """Bytes read per row and token of the vocabulary."""


PENALTIES: dict[str, Any] = {"presence": 1.0, "frequency": 0.2, "output": tuple(range(0, 5000, 7))}
STAGES = {
    "top_k 20, top_p 0.95": Stage(Row(temperature=0.6, top_k=20, top_p=0.95)),
    "top_p 0.9": Stage(Row(temperature=0.6, top_p=0.9)),
    "top_p 0.5": Stage(Row(temperature=1.0, top_p=0.5)),
    "min_p 0.05": Stage(Row(temperature=0.6, min_p=0.05)),
    "top_k 200": Stage(Row(temperature=0.6, top_k=200)),
    "top_k 1000": Stage(Row(temperature=0.6, top_k=1000)),
    "penalties": Stage(Row(temperature=0.6, **PENALTIES), 4),
    "penalties, top_k 20, top_p 0.95": Stage(Row(temperature=0.6, top_k=20, top_p=0.95, **PENALTIES), 4),
    "penalties, top_p 0.9": Stage(Row(temperature=0.6, top_p=0.9, **PENALTIES), 4),
    "300 biases": Stage(Row(temperature=0.6, biases={i * 500: 0.5 for i in range(300)})),
    "logprobs 5": Stage(Row(temperature=0.6, tops=5)),
    "logprobs 20": Stage(Row(temperature=0.6, tops=20)),
    "none of these": Stage(Row(temperature=0.6)),
}


def main() -> None:
    hardware = hardware_of(torch.cuda.get_device_name())
    bandwidth = math.inf if hardware is None else hardware.bandwidth
    for name, make in (("flat", flat), ("peaked", peaked)):
        print(f"{name + ', µs':<34}" + "".join(f"{rows:>9}" for rows in ROWS) + f"{'floor 256':>11}")
        logits = make(max(ROWS), VOCABULARY)
        print(f"{'plain':<34}" + "".join(f"{_plain(logits[:rows]):9.1f}" for rows in ROWS))
        for label, stage in STAGES.items():
            floor = max(ROWS) * VOCABULARY * stage.floor_bytes / bandwidth * 1e6
            print(f"{label:<34}" + "".join(f"{_time(logits[:rows], stage):9.1f}" for rows in ROWS) + f"{floor:11.1f}")
        for label in ("top_k 20, top_p 0.95", "top_p 0.9", "penalties", "logprobs 5"):
            print(f"  {label}: {_kernels(logits, STAGES[label])}")


def _plain(logits: torch.Tensor) -> float:
    batch = make_batch(logits, [Row(temperature=0.6)] * len(logits), "cuda")
    return microseconds(lambda number: sample(batch.logits, batch.rows, 0), CALLS)


def _time(logits: torch.Tensor, stage: Stage) -> float:
    call = _Call(logits, stage, CALLS)
    return microseconds(call.run, CALLS)


def _kernels(logits: torch.Tensor, stage: Stage) -> str:
    call = _Call(logits, stage, 6)
    call.run(0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(1, 6):
            call.run(number)
        torch.cuda.synchronize()
    events = {event.key: event.device_time_total / event.count for event in profiler.key_averages()}
    return ", ".join(f"{name} {time:.1f}" for name, time in events.items() if "Memcpy" not in name)


class _Call:
    """Sampling of the same plain samples in each call."""

    def __init__(self, logits: torch.Tensor, stage: Stage, calls: int) -> None:
        batch = make_batch(logits, [stage.row] * len(logits), "cuda")
        self._batch = batch
        self._plain = batch.samples.tokens.clone()
        self._tokens = [batch.samples.tokens.clone() for _ in range(calls)]
        self._lists = stage.row.listed
        self._reports = stage.row.tops >= 0
        self._workspace = Workspace(len(logits), VOCABULARY, torch.device("cuda"))

    def run(self, number: int) -> None:
        batch, tokens = self._batch, self._tokens[number]
        tokens.copy_(self._plain)
        samples = Samples(tokens, batch.samples.last_token)
        resample(batch.logits, batch.rows, samples, batch.tables, self._workspace, lists=self._lists)
        if self._reports:
            report_cuda(batch.logits, batch.rows, tokens, self._workspace)


if __name__ == "__main__":
    main()
