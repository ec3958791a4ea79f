"""Engine without a model, for benchmarks of the other components: its tokens are arbitrary and available at once."""

from __future__ import annotations

import numpy as np

from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.wire.plan import IntArray, StepPlan, StepResult


class StubEngine:
    """Samples token n modulo `vocab_size` in every row of step n, without EOS tokens."""

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

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: StepPlan) -> bool:
        return True

    def mask_memory(self, rows: int) -> IntArray:
        return np.empty((rows, -(-self.limits.vocab_size // 32)), np.int32)

    def sample(self, handle: StepPlan, masks: IntArray) -> None:
        """There are no logits to mask."""

    def collect(self, handle: StepPlan) -> StepResult:
        token = self._tokens[handle.step % len(self._tokens)]
        return StepResult(handle.step, np.full(len(handle.sampled_slots), token, np.int32))

    def close(self) -> None:
        pass
