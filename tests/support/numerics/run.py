"""Serve a workload with the real scheduler and step loop, and record the outcome."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from minisgl import kv_layout
from minisgl.attention.batch import KVPool
from minisgl.config import Device, DType, SchedulerConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.pages import Owner
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import REQUEST_ID_BYTES, Counters, Submit
from minisgl.wire.plan import EMPTY, IntArray, StepPlan, StepResult
from support.engines import create_engine
from support.messages import submit_of
from support.numerics.cases import Case
from support.numerics.workload import ANSWER, Ask, Workload, cached_tokens, engine_config, scheduler_config
from support.scheduler_audit import check
from support.wrapped_engine import WrappedEngine

_CHECK_EVERY = 16
"""Steps between two audits of the scheduler's state, which cost more than a step."""
_SHRINK = 0.94
_MOST_STEPS = 5000
_TYPICAL = 64


@dataclass
class Outcome:
    """Outcome of a workload; lists and keys are by the index of a request in the workload."""

    tokens: list[list[int]]
    cached: list[int]
    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Logits [vocab] by request and token, from which the token was sampled, on the engine's device."""
    unowned_are_nan: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """By step: True where the free pages were full of NaN, on the engine's device."""
    counters: Counters = field(default_factory=Counters)
    log: list[tuple[str, int]] = field(default_factory=list)
    """`launch` and `collect` of each step, in the order in which the loop called the engine."""
    preempted_at: list[int] = field(default_factory=list)
    """Number of tokens of the probe at each of its preemptions."""
    peers: set[int] = field(default_factory=set)
    """Other requests that shared a step with the probe."""
    most_rows: int = 0
    joined_decodes: bool = False
    """True when a step computed part of the probe's prompt and decoded other rows."""
    was_joined: bool = False
    """True when a step decoded the probe and computed part of another prompt."""
    pages: list[int] = field(default_factory=list)
    """Pages in the order in which rows received them."""
    audited_pages: int = 0
    """Number of checks that found a free page full of NaN."""
    peak_pages: int = 0

    def stacked(self, keys: Iterable[tuple[int, int]]) -> torch.Tensor:
        """Logits by request and token: [keys, vocab] float32 on the CPU."""
        return torch.stack([self.logits[key] for key in keys]).float().cpu()

    def steps_ahead(self) -> int:
        """Steps that were launched before the result of the step before them was read."""
        moment = {event: i for i, event in enumerate(self.log)}
        return sum(
            moment["launch", step + 1] < moment["collect", step]
            for kind, step in self.log[:-2]
            if kind == "launch"
            if ("launch", step + 1) in moment
        )


class Observer(WrappedEngine[Engine]):
    """Engine that records its plans before the engine behind it runs them."""

    def __init__(self, engine: Engine, scheduler: Scheduler, work: Workload, outcome: Outcome) -> None:
        super().__init__(engine)
        self._scheduler = scheduler
        self._probe = work.probe
        self._outcome = outcome
        self._sampled: dict[int, list[tuple[int, int]]] = {}
        self._free: dict[int, FreePages] = {}
        self._preemptions = 0

    def launch(self, plan: StepPlan) -> Any:
        self._note(plan)
        return self._engine.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        result = self._engine.collect(handle)
        self._outcome.log.append(("collect", result.step))
        return result

    def tap(self, kv: KVPool) -> Callable[[StepPlan, torch.Tensor], None]:
        """Called by the engine's thread with the logits of each step."""

        def on_logits(plan: StepPlan, logits: torch.Tensor) -> None:
            for key, row in zip(self._sampled.pop(plan.step), logits, strict=True):
                assert key not in self._outcome.logits, "a token was sampled twice"
                self._outcome.logits[key] = row.clone()
            free = self._free.pop(plan.step)
            # Evaluated at the end: waiting for the device here would end the overlap of steps.
            self._outcome.unowned_are_nan.append((plan.step, full_of_nan(kv, free)))
            self._outcome.audited_pages += free.total

        return on_logits

    def _note(self, plan: StepPlan) -> None:
        outcome, table = self._outcome, self._scheduler.table
        outcome.log.append(("launch", plan.step))
        outcome.pages += plan.page_updates[2].tolist()
        # The plan has just been made: pages that are free now are poisoned by an earlier step or by this one.
        if len(plan.sampled_slots):
            self._free[plan.step] = free_pages(self._scheduler)
            ends = (plan.prefill_starts + plan.prefill_lengths)[plan.prefill_sample == 1]
            index = np.concatenate((plan.decode_positions + 1, ends)) - table.prompt_length[plan.sampled_slots]
            self._sampled[plan.step] = list(zip(map(self._number, plan.sampled_slots), index.tolist(), strict=True))
        decode, prefill = set(map(self._number, plan.decode_slots)), set(map(self._number, plan.prefill_slots))
        rows = decode | prefill
        outcome.most_rows = max(outcome.most_rows, len(rows))
        used = self._scheduler.config.num_pages - self._scheduler.pages.available
        outcome.peak_pages = max(outcome.peak_pages, used)
        if self._probe not in rows:
            return
        outcome.peers |= rows - {self._probe}
        outcome.joined_decodes |= self._probe in prefill and bool(decode)
        outcome.was_joined |= self._probe in decode and bool(prefill)
        row = next(r for r in table.requests if r is not None and _number(r.id) == self._probe)
        if row.preemptions > self._preemptions:
            self._preemptions = row.preemptions
            outcome.preempted_at.append(len(row.tokens) - row.prompt_length)

    def _number(self, slot: np.int32) -> int:
        request = self._scheduler.table.requests[slot]
        assert request is not None, "a step of a row that nobody holds"
        return _number(request.id)


class FreePages(NamedTuple):
    full: IntArray
    window: IntArray
    """Those of layers with a window."""

    @property
    def total(self) -> int:
        return len(self.full) + len(self.window)


def free_pages(scheduler: Scheduler) -> FreePages:
    """Pages that nobody owns."""
    pools = scheduler.pages.pool, None if scheduler.pages.windows is None else scheduler.pages.windows.pool
    return FreePages(
        *(EMPTY if pool is None else np.flatnonzero(pool.owner == Owner.FREE).astype(np.int32) for pool in pools)
    )


def full_of_nan(kv: KVPool, pages: FreePages) -> torch.Tensor:
    """True when all of these pages are full of NaN; the answer stays on the pool's device."""
    device = kv.groups[0].keys.device
    full, window = (torch.from_numpy(part).long().to(device) for part in pages)
    found = [
        pool[:, window if group.in_window else full].isnan().all()
        for group in kv.groups
        for pool in (group.keys, group.values)
    ]
    return torch.stack(found).all()


def serve(
    work: Workload, config: SchedulerConfig, engine: Engine, shown: CpuEngine | CudaEngine | None = None
) -> Outcome:
    """Run the workload to its end. `shown`: the engine, or rank 0's part of it, whose logits and KV pool are
    observed."""
    numbers = len(work.asks) + len(work.earlier)
    outcome = Outcome([[] for _ in range(numbers)], [0] * numbers)
    scheduler = Scheduler(config)
    outcome.counters = scheduler.counters
    observer = Observer(engine, scheduler, work, outcome)
    if shown is not None:
        shown.runner.logits_hook = observer.tap(shown.runner.kv)
    loop = StepLoop(scheduler, observer)

    def run(asks: dict[int, Ask]) -> None:
        probe = outcome.tokens[work.probe]
        waiting = sorted(asks.items(), key=lambda item: item[1].after)
        for step in range(_MOST_STEPS):
            while waiting and waiting[0][1].after <= (len(probe) or -1):
                number, ask = waiting.pop(0)
                scheduler.submit(_submit(number, ask), number)
            if not scheduler.has_work:
                assert not waiting
                return
            output = loop.step()
            if output is not None:
                _take(outcome, output)
            if shown is not None and step % _CHECK_EVERY == 0:
                check(scheduler)
        raise AssertionError(f"not done after {_MOST_STEPS} steps: {scheduler.counters}")

    run(dict(enumerate(work.earlier, len(work.asks))))
    run(dict(enumerate(work.asks)))
    check(scheduler)
    assert scheduler.pages.available == config.num_pages, "pages were not given back"
    dirty = {step for step, is_nan in outcome.unowned_are_nan if not is_nan}
    assert not dirty, f"steps {sorted(dirty)}: a free page is not filled with NaN"
    return outcome


def serve_case(
    case: Case, work: Workload, checkpoint: Path, device: Device = "cpu", dtype: DType = "auto"
) -> tuple[Outcome, EngineStats]:
    """Run the workload of a case in an engine of one rank. Its pool has pages of layers with a window for sequences
    that are as short as these."""
    with mock.patch.object(kv_layout, "TYPICAL_TOKENS", _TYPICAL):
        return _serve_case(case, work, checkpoint, device, dtype)


def _serve_case(
    case: Case, work: Workload, checkpoint: Path, device: Device, dtype: DType
) -> tuple[Outcome, EngineStats]:
    config = pool_config(case, work, checkpoint, device, dtype)
    engine = create_engine(engine_config(checkpoint, config, device, dtype))
    limits = engine.limits
    assert (limits.window, limits.num_window_pages) == (config.window, config.num_window_pages)
    assert limits.state_checkpoints == config.state_checkpoints
    assert limits.checkpoints_per_row == config.checkpoints_per_row
    try:
        return serve(work, config, engine, engine), engine.stats
    finally:
        engine.close()


def _submit(number: int, ask: Ask) -> Submit:
    return submit_of(
        id=number.to_bytes(REQUEST_ID_BYTES, "big"),
        prompt=np.array(ask.prompt, np.int32).tobytes(),
        max_tokens=ask.max_tokens,
        temperature=ask.sampling.temperature,
        top_k=ask.sampling.top_k,
        top_p=ask.sampling.top_p,
        min_p=ask.sampling.min_p,
        seed=ask.sampling.seed or 0,
        ignore_eos=True,
        stop_token_ids=ask.sampling.stop_token_ids,
        priority=ask.priority,
    )


def _number(request_id: bytes) -> int:
    return int.from_bytes(request_id, "big")


def _take(outcome: Outcome, output: StepOutput) -> None:
    assert not output.failures, output.failures
    columns = (output.client, output.index, output.tokens, output.cached)
    for number, index, token, cached in zip(*(column.tolist() for column in columns), strict=True):
        assert index == len(outcome.tokens[number]), "a token was lost or came twice"
        outcome.tokens[number].append(token)
        outcome.cached[number] = cached


def pool_config(
    case: Case, work: Workload, checkpoint: Path, device: Device = "cpu", dtype: DType = "auto"
) -> SchedulerConfig:
    """Configuration with a pool for the case: ample, or so small that the probe is preempted in the middle of its
    answer.

    The latter is found with trial runs, since the scheduler's decisions depend on lengths alone, not on tokens.
    """
    needed = work.pages(case.page)
    ample = next(
        config
        for pages in itertools.count(needed, needed)
        if (config := scheduler_config(case, work, pages, checkpoint, device, dtype)).window is None
        or config.num_window_pages >= needed
    )
    if not case.preemption:
        return ample
    pages = _trial(work, ample).peak_pages - 1
    while pages * case.page >= work.longest:
        config = scheduler_config(case, work, pages, checkpoint, device, dtype)
        trial = _trial(work, config)
        if is_disturbed(trial) and trial.cached[work.probe] == cached_tokens(case):
            return config
        pages = min(math.floor(pages * _SHRINK), pages - 1)
    raise AssertionError(f"no size of the pool makes the probe give way: {case}")


def is_disturbed(outcome: Outcome) -> bool:
    """True when the probe was preempted in the middle of its answer."""
    return any(ANSWER // 8 <= at <= ANSWER - ANSWER // 8 for at in outcome.preempted_at)


def _trial(work: Workload, config: SchedulerConfig) -> Outcome:
    return serve(work, config, _NoModel(config))


class _NoModel:
    """Engine without a model: arbitrary tokens, immediately."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.stats = EngineStats()
        self.limits = EngineLimits(
            num_pages=config.num_pages,
            page_size=config.page_size,
            window=config.window,
            num_window_pages=config.num_window_pages,
            state_checkpoints=config.state_checkpoints,
            checkpoints_per_row=config.checkpoints_per_row,
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=(),
        )

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: StepPlan) -> bool:
        raise AssertionError("the requests have no constraints")

    def mask_memory(self, rows: int) -> IntArray:
        raise AssertionError("the requests have no constraints")

    def sample(self, handle: StepPlan, masks: IntArray) -> None:
        raise AssertionError("the requests have no constraints")

    def collect(self, handle: StepPlan) -> StepResult:
        rows = np.arange(len(handle.sampled_slots), dtype=np.int32)
        return StepResult(handle.step, (handle.step * 31 + rows * 17) % self.limits.vocab_size)

    def close(self) -> None:
        """There is nothing to free."""
