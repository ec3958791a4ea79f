"""Late steps wait for their masks, not for the calls of the next step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.engine import create_engine
from minisgl.engine.start.dummy_steps import Sampling, dummy_plan, step_limits
from minisgl.engine.watched_engine import WatchedEngine
from minisgl.wire.plan import IntArray, StepPlan

ROWS = 3
DEADLINE_SECONDS = 30.0


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[CpuEngine]:
    torch.set_num_threads(1)
    engine = create_engine(EngineConfig(model=str(checkpoint), page_size=4, num_pages=16, max_running=ROWS))
    assert isinstance(engine, CpuEngine)
    yield engine


def late_plans(engine: CpuEngine) -> list[StepPlan]:
    """Two steps of the same constrained rows."""
    limits = step_limits(engine.runner, max_step_tokens=16, max_model_len=16)
    first = dummy_plan(limits, decode=ROWS, sampling=[Sampling(masks=True)])
    second = dummy_plan(limits, decode=ROWS)
    return [msgspec.structs.replace(plan, step=step) for step, plan in enumerate((first, second))]


def masks_of(engine: CpuEngine, token: int) -> IntArray:
    """Masks that allow only one token."""
    masks = engine.mask_memory(ROWS)
    masks[:] = 0
    masks[:, token // 32] = 1 << token % 32
    return masks


def test_masks_may_come_after_the_next_launch_and_from_another_thread(engine: CpuEngine) -> None:
    plans = late_plans(engine)
    first = engine.launch(plans[0])
    assert engine.waits_for_masks(first)
    masks = masks_of(engine, 17)
    second = engine.launch(plans[1])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.sample, first, masks).result(DEADLINE_SECONDS)
    assert engine.collect(first).tokens.tolist() == [17] * ROWS
    engine.sample(second, masks_of(engine, 21))
    assert engine.collect(second).tokens.tolist() == [21] * ROWS
    engine.close()


@pytest.mark.parametrize("launched", [1, 2])
def test_an_engine_closes_while_steps_wait_for_masks(engine: CpuEngine, launched: int) -> None:
    for plan in late_plans(engine)[:launched]:
        engine.launch(plan)
    engine.close()


class _Launching:
    """An engine whose launches last until they are told to end."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self.limits, self.stats = engine.limits, engine.stats
        self.begun, self.resume = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, plan: StepPlan) -> Any:
        if plan.step:
            self.begun.set()
            assert self.resume.wait(DEADLINE_SECONDS)
        return self._engine.launch(plan)


def test_masks_do_not_end_the_watch_of_a_launch(engine: CpuEngine) -> None:
    slow: Any = _Launching(engine)
    watched = WatchedEngine(slow)
    plans = late_plans(engine)
    first = watched.launch(plans[0])
    assert watched.busy_since is None
    masks = masks_of(engine, 5)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(watched.launch, plans[1])
        assert slow.begun.wait(DEADLINE_SECONDS)
        since = watched.busy_since
        watched.sample(first, masks)
        assert since is not None and watched.busy_since == since <= time.monotonic()
        slow.resume.set()
        handle = second.result(DEADLINE_SECONDS)
    assert watched.busy_since is None
    assert np.array_equal(watched.collect(first).tokens, [5] * ROWS)
    watched.sample(handle, masks_of(engine, 6))
    watched.collect(handle)
    watched.close()
