"""Engine of a model that does not generate: each step turns texts into their pooled outputs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from minisgl.attention.packed import PackedAttention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import PackedStep
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.runner import Runner
from minisgl.engine.step_guard import StepGuard, check_hashes, gather_hashes
from minisgl.errors import EngineError
from minisgl.models.decoder import Decoder
from minisgl.models.encoder import Encoder
from minisgl.models.pooler import Pooler
from minisgl.wire.plan import IntArray, StepPlan, StepResult


class Texts(Protocol):
    """Model of one rank, up to the pooled outputs. It does not wait for the device."""

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        """Outputs [S, size] float32 of the texts that end in this step."""
        ...


class PagedTexts:
    """Texts whose tokens attend to earlier ones only: they are computed in chunks, behind cached prefixes."""

    def __init__(self, runner: Runner, pooler: Pooler) -> None:
        self._runner = runner
        self._pooler = pooler

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        packed = PackedStep(plan, self._runner.tables)
        step = packed.view(packed.on_host().to(self._runner.device, non_blocking=True))
        return self._pooler.output(self._runner.run_hidden(packed, step))


class PackedTexts:
    """Texts that are computed whole, one after the other in one batch without padding, and without a KV pool."""

    def __init__(
        self, model: Decoder | Encoder, attention: PackedAttention, pooler: Pooler, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._device = device

    def outputs(self, plan: StepPlan) -> torch.Tensor:
        lengths = plan.prefill_lengths
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
        types = np.zeros(0, np.int32)
        if len(plan.second_texts):
            second = np.repeat(plan.second_texts, lengths)
            types = ((second > 0) & (positions >= second)).astype(np.int32)
        # One copy to the device.
        parts = [plan.prefill_tokens, positions, offsets, types]
        on_device = torch.from_numpy(np.concatenate(parts)).to(self._device, non_blocking=True)
        tokens, places, bounds, token_types = torch.split(on_device, list(map(len, parts)))
        self._attention.begin(bounds, lengths)
        if isinstance(self._model, Encoder):
            hidden = self._model.forward(tokens, places, self._attention, token_types if len(types) else None)
        else:
            hidden = self._model.forward(tokens, places, self._attention)
        return self._pooler.output(self._pooler.take(hidden, bounds))


class _Launched(NamedTuple):
    values: torch.Tensor
    """[S, size] float32, on the host."""
    hashes: torch.Tensor | None
    """Of each rank's values, with audit."""
    done: torch.cuda.Event | None
    """End of the copy to the host."""


class PoolingEngine:
    """Implements `interface.Engine`. A thread launches the steps, so that the scheduler continues meanwhile: on a GPU
    the kernels of hundreds of texts take longer than their launches, on a CPU torch releases the interpreter lock."""

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
        return False

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
            values = self._texts.outputs(plan)
            hashes = gather_hashes(self._parallel, values.view(torch.int32).flatten()) if self._compare_ranks else None
            if self._stream is None:
                return _Launched(values, hashes, None)
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            return _Launched(on_host, hashes, done)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _no_masks() -> EngineError:
    return EngineError("wrong_task", "the model does not generate: it has no grammars")
