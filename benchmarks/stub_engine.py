"""An engine without a model, for benchmarks of everything around one: tokens come at once and mean nothing."""

from __future__ import annotations

import numpy as np

from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.wire.plan import StepPlan, StepResult


class StubEngine:
    """Answers every sampled row of step n with token n modulo `vocab_size`, skipping EOS ids."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.stats = EngineStats(prefill_backend="stub", decode_backend="stub")
        eos = set(limits.eos_token_ids)
        self._tokens = [token for token in range(min(limits.vocab_size, 1024)) if token not in eos]

    def launch(self, plan: StepPlan) -> StepPlan:
        self.stats.steps += 1
        self.stats.prefill_tokens += len(plan.prefill_tokens)
        self.stats.decode_tokens += len(plan.decode_slots)
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        token = self._tokens[handle.step % len(self._tokens)]
        return StepResult(handle.step, np.full(len(handle.sampled_slots), token, np.int32))

    def close(self) -> None:
        pass
