"""Engine on a CUDA device: all work is queued on one stream, and the host waits only for results and captures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.attention.cascade import CascadeLayout
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import PackedStep, StepSize, StepViews
from minisgl.engine.graphs.sampling_graphs import SamplingGraphs
from minisgl.engine.graphs.step_graphs import StepGraph, StepGraphs
from minisgl.engine.host_signal import HostSignal
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.logits_processors import StepProcessors
from minisgl.engine.runner import PlainSample, Runner, StepTensors
from minisgl.engine.step_guard import StepGuard, check_hashes, gather_hashes
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.wire.plan import IntArray, StepPlan, StepResult, VerifiedRows

_RING: Final = 4
"""Number of staging buffers: one more than the steps that are ever in flight."""
_POLL_SECONDS: Final = 50e-6
_MASKS: Final = 256
"""Masks in pinned memory, before a step needs more."""


class _Staging:
    """Pinned memory of one launched step: inputs for the device, and results."""

    def __init__(self, capacity: int, rows: int, ranks: int) -> None:
        """`rows`: most sampled ones."""
        self.step = -1
        """Number of the step that is not collected yet; −1: free."""
        self.unsampled: tuple[StepGraph | None, PlainSample] | None = None
        """The step while it is late, with its graph, unless its sampling is queued."""
        self.queued: _QueuedMasks | None = None
        """Masks for which its sampling waits."""
        self._input = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._tokens = torch.empty(rows, dtype=torch.int32, pin_memory=True)
        self._verified = torch.empty(4 * rows, dtype=torch.int32, pin_memory=True)
        self._num_verified = 0
        self._hashes = torch.empty(ranks, dtype=torch.int64, pin_memory=True)
        self._sampled = 0
        self._processors = StepProcessors()
        self._reports: list[torch.Tensor | None] = []
        self._done = torch.cuda.Event()

    def upload(self, packed: PackedStep, buffer: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a step's inputs to `buffer`, or to new memory where they are too large for it. Returns the
        memory."""
        if packed.size > len(self._input):
            self._input = torch.empty(packed.size, dtype=torch.int32, pin_memory=True)
        if packed.size > len(buffer):
            buffer = torch.empty(packed.size, dtype=torch.int32, device=buffer.device)
        packed.write(self._input.numpy()[: packed.size])
        buffer[: packed.size].copy_(self._input[: packed.size], non_blocking=True)
        return buffer

    def download(self, results: StepTensors, hashes: torch.Tensor | None, processors: StepProcessors) -> None:
        """Queue the copies of a step's results; `processors` decodes the log-probabilities."""
        self._processors = processors
        self._reports = [_to_host(report) for report in (results.report, results.prompt_report)]
        self._sampled = len(results.tokens)
        self._tokens[: self._sampled].copy_(results.tokens, non_blocking=True)
        self._num_verified = 0
        if results.verified is not None:
            self._num_verified = results.verified.numel()
            self._verified[: self._num_verified].copy_(results.verified.view(-1), non_blocking=True)
        if hashes is not None:
            self._hashes.copy_(hashes, non_blocking=True)
        self._done.record()

    def wait(self) -> tuple[StepResult, list[int]]:
        """Wait for the copies; the result and the hashes. The copy of the inputs is complete as well afterwards."""
        assert self.unsampled is None and self.queued is None, "a late step is collected before it is sampled"
        self._done.synchronize()
        tokens = self._tokens[: self._sampled].numpy().copy()
        step, self.step = self.step, -1
        report, prompt_report = (None if each is None else each.numpy() for each in self._reports)
        logprobs = self._processors.unpack(report, prompt_report)
        verified = None
        if self._num_verified:
            verified = VerifiedRows(*self._verified[: self._num_verified].numpy().reshape(4, -1).copy())
        return StepResult(step, tokens, *logprobs, verified=verified), self._hashes.tolist()


class _MaskViews(NamedTuple):
    """Views of the memory of so many masks; a step makes none, as each takes the host microseconds."""

    masks: IntArray
    """Pinned memory [rows, words]"""
    slots: NDArray[np.int64]
    """Pinned memory [rows]"""
    pinned: torch.Tensor
    """Slots and masks, flat."""
    on_device: torch.Tensor
    """Like `pinned`, on the device."""
    device_slots: torch.Tensor
    device_masks: torch.Tensor


class _QueuedMasks(NamedTuple):
    """Masks whose copy to the device waits for the host."""

    views: _MaskViews
    slots: IntArray
    """Late rows of the step."""
    number: int
    """See `HostSignal.wait`."""


class _Masks:
    """Memory for the masks of a late step, of which there is one at a time. They go to the device while the model of
    that step runs, on a stream of their own: steps that read earlier masks are all collected by then."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._most = rows
        self._pinned = self._pin(min(rows, _MASKS))
        self._on_device = torch.empty(rows * (2 + self._words), dtype=torch.int32, device=device)
        self._views: dict[int, _MaskViews] = {}
        self._stream = torch.cuda.Stream()
        self._stored = torch.cuda.Event()
        self._signal = HostSignal()

    @property
    def can_queue(self) -> bool:
        """Whether `queue` may be called."""
        return self._signal.is_supported

    def memory(self, rows: int) -> IntArray:
        """Pinned memory [rows, words]."""
        return self._of(rows).masks

    def store(self, tables: ProcessorTables, slots: IntArray) -> None:
        """Store the masks in `memory` of `slots` in the tables, before later work of the current stream."""
        views = self._of(len(slots))
        views.slots[:] = slots
        with torch.cuda.stream(self._stream):
            self._copy(views, tables)
        self._stored.wait()

    def queue(self, tables: ProcessorTables, slots: IntArray) -> _QueuedMasks:
        """The same for masks that are not filled yet: later work of the current stream waits for `release`."""
        views = self._of(len(slots))
        with torch.cuda.stream(self._stream):
            number = self._signal.wait()
            self._copy(views, tables)
        self._stored.wait()
        return _QueuedMasks(views, slots, number)

    def release(self, queued: _QueuedMasks, masks: IntArray) -> None:
        """Let the device use these masks; steps before that of the masks are collected."""
        # Not in `queue`, when the copy of the masks before may not have run.
        queued.views.slots[:] = queued.slots
        if masks is not queued.views.masks:
            queued.views.masks[:] = masks
        self._signal.reach(queued.number)

    def wait(self) -> None:
        """Wait until other threads have released all masks, before work that waits for the device."""
        while self._signal.is_awaited:
            time.sleep(_POLL_SECONDS)

    def release_all(self) -> None:
        """End all waits, whatever the masks are."""
        self._signal.reach(self._signal.newest)

    def _copy(self, views: _MaskViews, tables: ProcessorTables) -> None:
        views.on_device.copy_(views.pinned, non_blocking=True)
        tables.set_bitmasks(views.device_slots, views.device_masks)
        self._stored.record()

    def _of(self, rows: int) -> _MaskViews:
        if (views := self._views.get(rows)) is not None:
            return views
        size = rows * (2 + self._words)
        if size > len(self._pinned):
            self._pinned = self._pin(min(2 * rows, self._most))
            self._views.clear()
        pinned, on_device = self._pinned[:size], self._on_device[:size]
        self._views[rows] = views = _MaskViews(
            pinned[2 * rows :].view(rows, self._words).numpy(),
            pinned[: 2 * rows].view(torch.int64).numpy(),
            pinned,
            on_device,
            on_device[: 2 * rows].view(torch.int64),
            on_device[2 * rows :].view(rows, self._words),
        )
        return views

    def _pin(self, rows: int) -> torch.Tensor:
        """Pinned memory for `rows` slots and masks."""
        return torch.empty(rows * (2 + self._words), dtype=torch.int32, pin_memory=True)


def _to_host(report: torch.Tensor | None) -> torch.Tensor | None:
    """Queue the copy of log-probabilities to pinned memory."""
    if report is None:
        return None
    return torch.empty(report.shape, dtype=report.dtype, pin_memory=True).copy_(report, non_blocking=True)


class CudaEngine:
    """Implements `interface.Engine`. A captured step is one graph replay between two small copies."""

    def __init__(
        self,
        runner: Runner,
        parallel: TensorParallel,
        limits: EngineLimits,
        stats: EngineStats,
        *,
        max_step_tokens: int,
        largest_graph: int,
        prefill_graphs: Sequence[StepSize],
        audit: bool,
        progress: Callable[[float], None],
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.runner = runner
        self._parallel = parallel
        self._compare_ranks = audit and parallel.size > 1
        self._stream = torch.cuda.Stream()
        # Large enough for all but unusual steps: three values per token, and per row about fifteen and some page
        # updates.
        rows = max(limits.max_running, limits.max_decode_rows)
        capacity = 4 * max_step_tokens + 32 * rows + 1024
        self._upload = torch.zeros(capacity, dtype=torch.int32, device=runner.tables.page_table.device)
        self._views = StepViews(self._upload)
        self._ring = [_Staging(capacity, rows, parallel.size) for _ in range(_RING)]
        self._masks = _Masks(limits.max_running, limits.vocab_size, self._upload.device)
        self._launched = 0
        self._guard = StepGuard()
        self._graphs = StepGraphs()
        self._sampling = SamplingGraphs()
        torch.cuda.synchronize()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._graphs.capture(runner, largest_graph, prefill_graphs, self._upload, progress, self._masks.wait)
            # Other ranks do not know when this one is idle.
            while parallel.size > 1 and self._graphs.capture_next() is not None:
                pass
            for graph in self._graphs.captured:
                self._prepare(graph)
        torch.cuda.synchronize()

    def launch(self, plan: StepPlan) -> _Staging:
        with self._guard.step(), torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._launch(plan)

    def use_idle_time(self) -> bool:
        with self._guard.step(), torch.inference_mode(), torch.cuda.stream(self._stream):
            # What earlier steps have left unused may be needed by the capture.
            torch.cuda.empty_cache()
            graph = self._graphs.capture_next()
            self._prepare(graph)
            return graph is not None

    def waits_for_masks(self, handle: _Staging) -> bool:
        return handle.queued is not None

    def mask_memory(self, rows: int) -> IntArray:
        return self._masks.memory(rows)

    def sample(self, handle: _Staging, masks: IntArray) -> None:
        if (queued := handle.queued) is not None:
            with self._guard.step():
                handle.queued = None
                self._masks.release(queued, masks)
            return
        with self._guard.step(), torch.inference_mode(), torch.cuda.stream(self._stream):
            assert handle.unsampled is not None, "only late steps are sampled later"
            graph, plain = handle.unsampled
            handle.unsampled = None
            slots = plain.packed.processors.late_slots
            memory = self.mask_memory(len(slots))
            if masks is not memory:
                memory[:] = masks
            self._masks.store(self.runner.tables.device_processors, slots)
            self._finish(handle, graph, plain)

    def collect(self, handle: _Staging) -> StepResult:
        with self._guard.step():
            result, hashes = handle.wait()
            if self._compare_ranks:
                check_hashes(result.step, hashes)
            return result

    def close(self) -> None:
        self._masks.release_all()
        self._stream.synchronize()
        self._sampling.clear()
        self._graphs.clear()
        self._parallel.close()
        # Free weights and pool even if a reference to this engine remains.
        del self.runner, self._upload, self._views, self._ring, self._masks
        torch.cuda.empty_cache()

    def _launch(self, plan: StepPlan) -> _Staging:
        staging = self._ring[self._launched % _RING]
        assert staging.step < 0, "a step is launched before the step four before it is collected"
        self._launched += 1
        staging.step = plan.step
        graph = None if self.runner.tables.processors.reports_prompts(plan) else self._graphs.find(plan)
        # Before the step's inputs are in the buffer.
        self._prepare(graph)
        cascade = graph.cascade if graph else self._eager_cascade(plan)
        self._count(plan, graph, cascade)
        packed = PackedStep(plan, self.runner.tables, graph.size if graph else None, cascade)
        buffer = staging.upload(packed, self._upload)
        if graph is None:
            plain = self.runner.run_model(plan, packed, packed.view(buffer))
        else:
            plain = self._replay(plan, graph, packed, buffer)
        if plain.is_late and self._parallel.rank == 0:
            if not self._may_queue(graph, plain):
                staging.unsampled = graph, plain
                return staging
            processors = plain.packed.processors
            staging.queued = self._masks.queue(self.runner.tables.device_processors, processors.late_slots)
        self._finish(staging, graph, plain)
        return staging

    def _prepare(self, graph: StepGraph | None) -> None:
        """Count captures, and capture the sampling behind a decode graph if it is new."""
        self.stats.captures = self._graphs.count
        if graph is not None and not graph.size.tokens and self._parallel.size == 1:
            self._sampling.capture(self.runner, graph, self._upload)

    def _may_queue(self, graph: StepGraph | None, plain: PlainSample) -> bool:
        """Whether the sampling of a late step is queued before its masks are filled. Nothing that is launched behind
        the wait may wait for the device: graphs do not, but the memory of reports or of a draft head may have to be
        allocated."""
        processors = plain.packed.processors
        if graph is None or len(processors.reported) or not self._masks.can_queue:
            return False
        if self.runner.drafting is not None:
            return False
        return self._sampling.find(graph, processors) is not None

    def _replay(self, plan: StepPlan, graph: StepGraph, packed: PackedStep, buffer: torch.Tensor) -> PlainSample:
        runner = self.runner
        if buffer is self._upload:
            step = self._views.of(packed)
        else:
            step = packed.view(buffer)
            # The graph reads its inputs at the address of its capture.
            self._upload[: packed.graph_size].copy_(buffer[: packed.graph_size])
        runner.apply_updates(packed, step)
        graph.replay(runner.attention_batch(packed, step))
        if buffer is not self._upload:
            # What the graph has completed.
            buffer[: packed.graph_size].copy_(self._upload[: packed.graph_size])
        runner.save_states()
        logits, tokens = graph.logits[: packed.sampled], graph.tokens[: packed.sampled]
        if packed.sampled:
            runner.call_hook(plan, logits)
        return PlainSample(packed, step, logits, tokens)

    def _finish(self, staging: _Staging, graph: StepGraph | None, plain: PlainSample) -> None:
        """Sample the rows that need more than the plain sample, and queue the download."""
        processors = plain.packed.processors
        sampling = None if graph is None else self._sampling.find(graph, processors)
        if sampling is not None:
            report = sampling.replay(processors)
            results = StepTensors(plain.tokens, report, verified=self.runner.verify(plain))
        else:
            results = self.runner.resample(plain)
        hashes = gather_hashes(self._parallel, results.tokens) if self._compare_ranks else None
        staging.download(results, hashes, processors)

    def _eager_cascade(self, plan: StepPlan) -> CascadeLayout | None:
        cascade = self.runner.attention.cascade
        return cascade.layout if cascade is not None and len(plan.shared_prefixes) else None

    def _count(self, plan: StepPlan, graph: StepGraph | None, cascade: CascadeLayout | None) -> None:
        self.stats.count(plan)
        self.stats.cascade_steps += cascade is not None
        self.stats.graph_replays += graph is not None
        self.stats.eager_prefill_steps += graph is None and len(plan.prefill_slots) > 0
        self.stats.eager_decode_steps += graph is None and not len(plan.prefill_slots)
