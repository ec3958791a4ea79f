"""Interface of engines for the scheduler. It does not import torch: tests and benchmarks use stub engines."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from minisgl.config import EngineSizes, Task
from minisgl.wire.plan import IntArray, StepPlan, StepResult
from minisgl.wire.status import DataTypes

MOST_PROMPTS: Final = 128
"""Prompts of a step for which an engine that generates captures steps: more wait for the next one."""


class EngineLimits(EngineSizes, frozen=True, kw_only=True):
    """Sizes of the started engine, equal on all ranks."""

    @property
    def task(self) -> Task:
        return "generate" if self.pooling is None else self.pooling.task


class EngineStats(msgspec.Struct, kw_only=True):
    """Totals since start, for benchmarks and tests."""

    steps: int = 0
    graph_replays: int = 0
    eager_prefill_steps: int = 0
    """Steps with prompts on a CUDA device that did not run as a CUDA graph."""
    eager_decode_steps: int = 0
    """Pure decode steps on a CUDA device that did not run as a CUDA graph."""
    cascade_steps: int = 0
    """Steps that read shared prefixes of decode rows once."""
    mixed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    parameter_bytes: int = 0
    kv_pool_bytes: int = 0
    start_seconds: dict[str, float] = {}
    """Duration of each phase of the start, in order: `imports`, `device` (its context, and the other ranks), `load`,
    `kernels` (importing their libraries), `warm_up` (the largest step), `pool`, `capture`."""
    compiled_kernels: int = 0
    """Number of our kernels that were compiled during the start because they were not built ahead of time."""
    captures: int = 0
    """CUDA graphs of steps that were captured."""
    compiled_after_ready: int = 0
    """Number of kernels that were compiled since, each while requests waited: the warm-up did not launch them."""
    prefill_backend: str = ""
    decode_backend: str = ""
    attention: dict[str, str] = {}
    """Attention backend by kind of attention, see `attention.overview`."""
    data_types: DataTypes | None = None
    transport: str = ""
    """Transport of the ranks' collectives: `TensorParallel.transport`."""

    def count(self, plan: StepPlan) -> None:
        """Count a launched step."""
        self.steps += 1
        self.prefill_tokens += len(plan.prefill_tokens)
        self.decode_tokens += len(plan.decode_slots)
        self.mixed_steps += bool(len(plan.prefill_slots) and len(plan.decode_slots))


class Engine(Protocol):
    """Executes plans strictly in the order of `launch`. At most two launched plans are not collected yet. After a
    failed step, `launch`, `sample` and `collect` raise EngineError `engine_failed`.

    A step is late if it samples rows that joined as late ones (`RowLogitsProcessors.late`). Its model runs at once, but
    sampling of rows with filters, processors or masks waits for masks: rank 0 gets them by `sample`, and the other
    ranks get its tokens. Neighbours of constrained rows have the tokens that they have alone."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    def launch(self, plan: StepPlan) -> Any:
        """Start the step and return a handle. It does not wait for the device, but for the first step of its size,
        which may also wait until another thread has given the masks of the step before."""
        ...

    def use_idle_time(self) -> bool:
        """Do work of tens of milliseconds that makes later steps faster. Call it while no step runs. False: there is
        none left."""
        ...

    def waits_for_masks(self, handle: Any) -> bool:
        """Whether the sampling of a late step is queued already, behind a wait for its masks. Then `sample` may come
        from another thread, and during or after the next launch."""
        ...

    def mask_memory(self, rows: int) -> IntArray:
        """Memory int32 [rows, ⌈vocab / 32⌉] for the masks of a late step, which belongs to the caller until `sample`.
        Call it when all steps before that step are collected, and before the next launch."""
        ...

    def sample(self, handle: Any, masks: IntArray) -> None:
        """Sample the rows of a late step, without waiting for the device. Call it before the next launch, unless
        `waits_for_masks`, and when all steps before that step are collected. `masks` int32 [L, ⌈vocab / 32⌉]: the
        allowed tokens of its L constrained rows in the order of the plan's sampled rows, the lowest bit first."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step. Handles must be collected in the order of their launch."""
        ...

    def close(self) -> None:
        """Finish launched steps and free the device. Call it once; only `limits` and `stats` may be used afterwards."""
        ...
