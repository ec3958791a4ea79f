"""CUDA graphs of the sampling that only some rows need: filters, logits processors and log-probabilities.

They follow a decode graph, whose logits and tokens they read and rewrite. Steps without such rows do not replay them.
"""

from __future__ import annotations

import torch

from minisgl.engine.graphs.capture import captured, padding_step
from minisgl.engine.graphs.step_graphs import StepGraph
from minisgl.engine.logits_processors import MANY_TOPS, StepProcessors
from minisgl.engine.runner import Runner


class SamplingGraph:
    """Captured `Sampler.resample_all` behind a decode graph. It reads its rows at the beginning of the upload
    buffer."""

    def __init__(self, runner: Runner, decode: StepGraph, upload: torch.Tensor, *, lists: bool) -> None:
        """Run once to load the kernels, then capture, on the current stream. All rows have the dummy slot."""
        _, step = padding_step(runner.tables, decode.size, decode.cascade, upload)
        rows = step.sample_slots, step.sample_positions, decode.tokens
        runner.sampler.resample_all(decode.logits, *rows, lists=lists)
        with captured() as self._graph:
            report = runner.sampler.resample_all(decode.logits, *rows, lists=lists)
        assert report is not None
        self._report = report

    def replay(self, processors: StepProcessors) -> torch.Tensor | None:
        """Queue the sampling. Returns the log-probabilities if any row reports them, valid until the next replay."""
        self._graph.replay()
        return self._report if len(processors.reported) else None


class SamplingGraphs:
    """Sampling graphs of decode graphs, with and without the stages that read lists."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[StepGraph, bool], SamplingGraph] = {}

    def capture(self, runner: Runner, decode: StepGraph, upload: torch.Tensor) -> None:
        """Capture the two graphs of a decode graph, unless they are. One rank only: several ranks gather no more logits
        than those of the rows that need it, whose number a graph cannot change. It overwrites `upload`."""
        for lists in (False, True):
            if (decode, lists) not in self._graphs:
                self._graphs[decode, lists] = SamplingGraph(runner, decode, upload, lists=lists)

    def find(self, decode: StepGraph, processors: StepProcessors) -> SamplingGraph | None:
        """The graph for a step whose rows need these stages; None if they need none, or must be sampled eagerly."""
        if not processors.stages or processors.stages & MANY_TOPS:
            return None
        return self._graphs.get((decode, processors.lists))

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
