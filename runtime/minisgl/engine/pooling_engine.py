"""Engine of a model that does not generate: each step turns texts into their pooled outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from minisgl.attention.layered import LayeredAttention
from minisgl.attention.packed import PackedAttention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import PackedStep, StepSize
from minisgl.engine.graphs.capture import padding_step
from minisgl.engine.graphs.sizes import fitting_size
from minisgl.engine.graphs.text_graphs import TextGraphs
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.runner import Runner
from minisgl.engine.step_guard import StepGuard, check_hashes, gather_hashes
from minisgl.errors import EngineError
from minisgl.models.decoder import Decoder
from minisgl.models.encoder import Encoder
from minisgl.models.pooler import Pooler
from minisgl.wire.plan import EMPTY, IntArray, StepPlan, StepResult

_NO_TEXTS: Final = StepPlan.build(epoch=0, step=0)


class Texts(Protocol):
    """Model of one rank, up to the pooled outputs. It does not wait for the device."""

    graphs: TextGraphs

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        """Outputs [S, size] float32 of the texts that end in this step, valid until the next one."""
        ...


class PagedTexts:
    """Texts whose tokens attend to earlier ones only: they are computed in chunks, behind cached prefixes."""

    def __init__(self, runner: Runner, pooler: Pooler, sizes: Sequence[StepSize] = ()) -> None:
        """`sizes`: of captured steps, as `text_sizes` gives them."""
        self._runner = runner
        self._pooler = pooler
        self._attention: dict[StepSize, LayeredAttention] = {}
        self.graphs = TextGraphs(sizes, self._work)
        most = max((PackedStep(_NO_TEXTS, runner.tables, size).size for size in sizes), default=0)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=runner.device)
        """Of captured steps."""

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        runner = self._runner
        size = fitting_size(self.graphs.sizes, plan, runner.attention.most_graph_keys)
        if size is not None and not self.graphs.has(size):
            size = None
        packed = PackedStep(plan, runner.tables, size)
        uploaded = _upload(packed.on_host(), runner.device)
        step = packed.view(uploaded)
        if size is None:
            return self._pooler.output(runner.run_hidden(packed, step))
        runner.apply_updates(packed, step)
        self._inputs[: packed.graph_size].copy_(uploaded[: packed.graph_size])
        self._attention[size].prepare(runner.attention_batch(packed, step))
        outputs = self.graphs.replay(size)[: packed.sampled]
        runner.save_states()
        return outputs

    def _work(self, size: StepSize) -> Callable[[], torch.Tensor] | None:
        runner = self._runner
        attention = runner.attention.for_graph(0, size.tokens, segments=size.segments + 1, prefix=size.prefix)
        if attention is None:
            return None
        self._attention[size] = attention
        packed, step = padding_step(runner.tables, size, None, self._inputs)
        batch = runner.attention_batch(packed, step)
        attention.prepare(batch)
        return lambda: self._pooler.output(runner.hidden(packed, step, batch, attention, step.sample_rows))


class PackedTexts:
    """Texts that are computed whole, one after the other in one batch without padding, and without a KV pool."""

    def __init__(
        self,
        model: Decoder | Encoder,
        attention: PackedAttention,
        pooler: Pooler,
        device: torch.device,
        sizes: Sequence[StepSize] = (),
    ) -> None:
        """`sizes`: of captured steps, as `text_sizes` gives them, for attention that can be captured."""
        assert attention.can_be_captured or not sizes
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._device = device
        self.graphs = TextGraphs(sizes, self._work)
        most = max((sum(_lengths(size)) for size in sizes), default=0)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=device)
        """Of captured steps: tokens, positions, types, offsets."""

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        lengths, tokens = plan.prefill_lengths, plan.prefill_tokens
        size = fitting_size(self.graphs.sizes, plan, most_keys=0)
        if size is not None and self.graphs.has(size):
            padding = size.tokens - len(tokens)
            # Behind the texts is one of padding, and the others are empty.
            offsets = _offsets([*lengths, padding, *[0] * (size.segments - len(lengths))])
            parts = [tokens, _positions(lengths), _types(plan) if len(plan.second_texts) else np.zeros_like(tokens)]
            inputs = np.concatenate([*(np.pad(part, (0, padding)) for part in parts), offsets])
            self._inputs[: len(inputs)].copy_(pinned(torch.from_numpy(inputs)), non_blocking=True)
            return self.graphs.replay(size)[: len(lengths)]
        parts = [tokens, _positions(lengths), _types(plan), _offsets(lengths)]
        # One copy to the device.
        on_device = _upload(torch.from_numpy(np.concatenate(parts)), self._device)
        of_tokens, positions, types, bounds = torch.split(on_device, list(map(len, parts)))
        self._attention.begin(bounds, lengths)
        return self._pooled(of_tokens, positions, types, bounds)

    def _work(self, size: StepSize) -> Callable[[], torch.Tensor]:
        tokens, positions, types, bounds = torch.split(self._inputs[: sum(_lengths(size))], _lengths(size))
        for part in (tokens, positions, types):
            part.zero_()
        bounds.fill_(size.tokens)
        bounds[:1].zero_()

        def run() -> torch.Tensor:
            self._attention.begin_captured(bounds, size.tokens)
            return self._pooled(tokens, positions, types, bounds)

        return run

    def _pooled(
        self, tokens: torch.Tensor, positions: torch.Tensor, types: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of the step that attention has begun. Without `types` all are 0."""
        if isinstance(self._model, Encoder):
            hidden = self._model.forward(tokens, positions, self._attention, types if len(types) else None)
        else:
            hidden = self._model.forward(tokens, positions, self._attention)
        return self._pooler.output(self._pooler.take(hidden, bounds))


def _lengths(size: StepSize) -> list[int]:
    """Lengths of tokens, positions, types and offsets, with those of the padding."""
    return [size.tokens, size.tokens, size.tokens, size.segments + 2]


def _offsets(lengths: IntArray | list[int]) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _positions(lengths: IntArray) -> IntArray:
    offsets = _offsets(lengths)
    return np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)


def _types(plan: StepPlan) -> IntArray:
    """Type of each token; empty where all are 0."""
    if not len(plan.second_texts):
        return EMPTY
    second = np.repeat(plan.second_texts, plan.prefill_lengths)
    return ((second > 0) & (_positions(plan.prefill_lengths) >= second)).astype(np.int32)


def pinned(host: torch.Tensor) -> torch.Tensor:
    """A copy from which the device reads by itself: from other memory it would first end the steps before this one."""
    return host.pin_memory()


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else pinned(host).to(device, non_blocking=True)


class _Launched(NamedTuple):
    values: torch.Tensor
    """[S, size] float32, on the host."""
    hashes: torch.Tensor | None
    """Of each rank's values, with audit."""
    done: torch.cuda.Event | None
    """End of the copy to the host."""


class PoolingEngine:
    """Implements `interface.Engine`. A thread launches the steps, so that the scheduler continues meanwhile: a step
    without a graph takes the host long to launch, and on a CPU torch releases the interpreter lock."""

    def __init__(
        self,
        texts: Texts,
        parallel: TensorParallel,
        limits: EngineLimits,
        stats: EngineStats,
        device: torch.device,
        *,
        audit: bool,
    ) -> None:
        self.limits = limits
        self.stats = stats
        self._texts = texts
        self._parallel = parallel
        self._compare_ranks = audit and parallel.size > 1
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._guard = StepGuard()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="minisgl-forward")

    def launch(self, plan: StepPlan) -> tuple[int, Future[_Launched]]:
        with self._guard.step():
            self.stats.count(plan)
            return plan.step, self._worker.submit(self._run, plan)

    def use_idle_time(self) -> bool:
        return self._worker.submit(self._capture).result()

    def waits_for_masks(self, handle: tuple[int, Future[_Launched]]) -> bool:
        return False

    def mask_memory(self, rows: int) -> IntArray:
        raise _no_masks()

    def sample(self, handle: tuple[int, Future[_Launched]], masks: IntArray) -> None:
        raise _no_masks()

    def collect(self, handle: tuple[int, Future[_Launched]]) -> StepResult:
        step, future = handle
        launched = future.result()
        if launched.done is not None:
            launched.done.synchronize()
        if launched.hashes is not None:
            check_hashes(step, launched.hashes.tolist())
        values = launched.values.numpy()
        return StepResult(step, np.where(np.isfinite(values).all(axis=1), 0, -1).astype(np.int32), pooled=values)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._parallel.close()
        # Free weights and pool even if a reference to this engine remains.
        del self._texts

    def _run(self, plan: StepPlan) -> _Launched:
        with self._guard.step(), torch.inference_mode(), self._on_stream():
            replays = self._texts.graphs.replays
            values = self._texts.outputs(plan)
            self._count(is_replay=self._texts.graphs.replays > replays)
            hashes = gather_hashes(self._parallel, values.view(torch.int32).flatten()) if self._compare_ranks else None
            if self._stream is None:
                return _Launched(values, hashes, None)
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            return _Launched(on_host, hashes, done)

    def _capture(self) -> bool:
        with self._guard.step(), torch.inference_mode(), self._on_stream():
            is_more = self._texts.graphs.capture_next()
            self.stats.captures = self._texts.graphs.count
            return is_more

    def _count(self, *, is_replay: bool) -> None:
        self.stats.captures = self._texts.graphs.count
        self.stats.graph_replays += is_replay
        self.stats.eager_prefill_steps += self._stream is not None and not is_replay

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _no_masks() -> EngineError:
    return EngineError("wrong_task", "the model does not generate: it has no grammars")
