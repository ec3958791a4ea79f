"""Engine without a GPU: one worker thread takes the place of the device, so that launching does not wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.audit import check_hashes, gather_hashes
from minisgl.engine.batch import PackedStep
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.runner import Runner
from minisgl.engine.step_guard import StepGuard
from minisgl.wire.plan import StepPlan, StepResult


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

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        with self._guard.step():
            self.stats.count(plan)
            return self._worker.submit(self._run, plan)

    def collect(self, handle: Future[StepResult]) -> StepResult:
        return handle.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._parallel.close()
        # Free weights and pool even if a reference to this engine remains.
        del self.runner

    def _run(self, plan: StepPlan) -> StepResult:
        with self._guard.step(), torch.inference_mode():
            return self._step(plan)

    def _step(self, plan: StepPlan) -> StepResult:
        packed = PackedStep(plan, self.runner.tables)
        tokens, *reports = self.runner.run(plan, packed, packed.view(packed.on_host()))
        if self._compare_ranks:
            check_hashes(plan.step, gather_hashes(self._parallel, tokens).tolist())
        on_host = [None if report is None else report.numpy() for report in reports]
        return StepResult(plan.step, tokens.numpy(), *packed.processors.unpack(*on_host))
