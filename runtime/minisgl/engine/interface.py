"""What the scheduler sees of an engine. No torch here: the scheduler's tests and benchmark use stub engines."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from minisgl.wire.plan import StepPlan, StepResult


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that the started engine settled on, equal on all ranks."""

    num_pages: int
    page_size: int
    max_running: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since start; benchmarks and tests read them."""

    steps: int = 0
    graph_replays: int = 0
    eager_decode_steps: int = 0
    """Pure decode steps that did not run as a CUDA graph although the device is CUDA."""
    cascade_steps: int = 0
    """Steps whose decode rows read what they share once."""
    mixed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    parameter_bytes: int = 0
    kv_pool_bytes: int = 0
    start_seconds: dict[str, float] = {}
    """By phase of the start, in their order: `imports`, `device` (its context, and the other ranks), `load`, `kernels`
    (libraries that bring them), `warm_up` (the largest step), `pool`, `capture`."""
    compiled_kernels: int = 0
    """Of our own, compiled during the start because they were not ahead of time."""
    prefill_backend: str = ""
    decode_backend: str = ""
    transport: str = ""
    """Transport of the ranks' collectives: `TensorParallel.transport`."""

    def count(self, plan: StepPlan) -> None:
        """Count a launched step."""
        self.steps += 1
        self.prefill_tokens += len(plan.prefill_tokens)
        self.decode_tokens += len(plan.decode_slots)
        self.mixed_steps += bool(len(plan.prefill_slots) and len(plan.decode_slots))


class Engine(Protocol):
    """Executes plans strictly in the order of `launch`. At most two launched plans are not collected yet. After a step
    that failed, both raise EngineError `engine_failed`."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    def launch(self, plan: StepPlan) -> Any:
        """Start the step and return a handle; does not wait for the device."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step. Handles are collected in the order of their launch."""
        ...

    def close(self) -> None:
        """Finish what was launched and free the device. Once, and nothing after it but `limits` and `stats`."""
        ...
