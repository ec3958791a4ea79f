"""Engine without a GPU: one worker thread takes the place of the device, so that launching does not wait."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import PackedStep
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.runner import PlainSample, Runner
from minisgl.engine.step_guard import StepGuard, check_hashes, gather_hashes
from minisgl.wire.plan import IntArray, StepPlan, StepResult, VerifiedRows


@dataclass(slots=True)
class _Launched:
    """A launched step."""

    masks: Future[IntArray] = field(default_factory=Future)
    """Masks for which a late step waits."""
    result: Future[StepResult] = field(default_factory=Future)


class CpuEngine:
    """Implements `interface.Engine`. torch releases the interpreter lock while it computes, so the scheduler
    continues."""

    def __init__(
        self, runner: Runner, parallel: TensorParallel, limits: EngineLimits, stats: EngineStats, *, audit: bool
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.runner = runner
        self._parallel = parallel
        self._compare_ranks = audit and parallel.size > 1
        self._guard = StepGuard()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="minisgl-forward")
        self._launched: deque[_Launched] = deque(maxlen=2)

    def launch(self, plan: StepPlan) -> _Launched:
        with self._guard.step():
            self.stats.count(plan)
            launched = _Launched()
            launched.result = self._worker.submit(self._run, plan, launched.masks)
            self._launched.append(launched)
            return launched

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: _Launched) -> bool:
        return True

    def mask_memory(self, rows: int) -> IntArray:
        return np.empty((rows, -(-self.limits.vocab_size // 32)), np.int32)

    def sample(self, handle: _Launched, masks: IntArray) -> None:
        with self._guard.step():
            handle.masks.set_result(masks)

    def collect(self, handle: _Launched) -> StepResult:
        return handle.result.result()

    def close(self) -> None:
        for launched in self._launched:
            launched.masks.cancel()
        self._worker.shutdown(wait=True)
        self._parallel.close()
        # Free weights and pool even if a reference to this engine remains.
        del self.runner

    def _run(self, plan: StepPlan, masks: Future[IntArray]) -> StepResult:
        with self._guard.step(), torch.inference_mode():
            packed = PackedStep(plan, self.runner.tables)
            plain = self.runner.run_model(plan, packed, packed.view(packed.on_host()))
            if plain.is_late and self._parallel.rank == 0:
                bitmasks = torch.from_numpy(masks.result())
                self.runner.tables.device_processors.set_bitmasks(plain.step.late_slots, bitmasks)
            return self._finish(plan.step, plain)

    def _finish(self, step: int, plain: PlainSample) -> StepResult:
        tokens, *reports, verified = self.runner.resample(plain)
        if self._compare_ranks:
            check_hashes(step, gather_hashes(self._parallel, tokens).tolist())
        on_host = [None if report is None else report.numpy() for report in reports]
        logprobs = plain.packed.processors.unpack(*on_host)
        rows = None if verified is None else VerifiedRows(*verified.numpy())
        return StepResult(step, tokens.numpy(), *logprobs, verified=rows)
