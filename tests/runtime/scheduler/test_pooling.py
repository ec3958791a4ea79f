"""Texts whose pooled outputs are wanted: each gets its own output once, with any budget, in chunks or whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import PooledOutput, SchedulerConfig
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import RequestError, StepOutput
from minisgl.wire.messages import Pool
from minisgl.wire.plan import IntArray, StepPlan, StepResult
from support.messages import submit_of
from support.scheduler_audit import check
from support.timed_engine import TimedEngine

VOCAB, LONGEST, PAGE, ROWS = 97, 32, 4, 5


class TextEngine:
    """Sums the tokens of each row, which it must get in order and without gaps; a text with token 13 has no finite
    output. The output is the sum, the length, and the index of the second text."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.stats = EngineStats()
        self.plans: list[StepPlan] = []
        self._cached: dict[int, tuple[int, ...]] = {}
        """Tokens whose last one is in a page."""
        self._rows: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert not len(plan.decode_slots)
        values, tokens, first = [], [], 0
        for slot, start, length, sample, second in zip(
            plan.prefill_slots.tolist(),
            plan.prefill_starts.tolist(),
            plan.prefill_lengths.tolist(),
            plan.prefill_sample.tolist(),
            plan.second_texts.tolist() or [0] * len(plan.prefill_slots),
            strict=True,
        ):
            part = plan.prefill_tokens[first : first + length].tolist()
            first += length
            row = self._rows[slot] = [*(self._rows.get(slot, [])[:start] if start else []), *part]
            if sample:
                values.append([sum(row) if len(row) == start + length else -1, start + length, second])
                tokens.append(-1 if 13 in part else 0)
        pooled = np.array(values, np.float32).reshape(-1, 3)
        return StepResult(plan.step, np.array(tokens, np.int32), pooled=pooled)

    def use_idle_time(self) -> bool:
        return False

    def waits_for_masks(self, handle: StepResult) -> bool:
        return False

    def mask_memory(self, rows: int) -> IntArray:
        raise AssertionError

    def sample(self, handle: StepResult, masks: IntArray) -> None:
        raise AssertionError

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None: ...


def loop_of(*, whole: bool, budget: int, overlap: bool = True, cache: str = "naive") -> StepLoop:
    sizes = dict(
        num_pages=ROWS if whole else 16,
        page_size=LONGEST if whole else PAGE,
        max_running=ROWS,
        max_model_len=LONGEST,
        vocab_size=VOCAB,
        eos_token_ids=(0, 7),
        pooling=PooledOutput(task="embed", size=3, whole_texts=whole),
    )
    config = SchedulerConfig(max_step_tokens=budget, overlap=overlap, cache=cache, audit=True, **sizes)  # type: ignore[arg-type]
    return StepLoop(Scheduler(config), TextEngine(EngineLimits(**sizes)))  # type: ignore[arg-type]


def pool(number: int, tokens: list[int], **fields: int | bytes) -> Pool:
    prompt = np.array(tokens, np.int32).tobytes()
    return Pool(id=number.to_bytes(16, "big"), prompt=prompt, **fields)  # type: ignore[arg-type]


def run(loop: StepLoop, each: Callable[[StepOutput], None]) -> None:
    while loop.scheduler.has_work:
        if (output := loop.step()) is not None:
            each(output)
        check(loop.scheduler)


TEXTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST), min_size=1, max_size=20)


@settings(max_examples=60)
@given(
    texts=TEXTS,
    whole=st.booleans(),
    budget=st.integers(1, 50),
    overlap=st.booleans(),
    dropped=st.sets(st.integers(0, 19)),
    pairs=st.booleans(),
)
def test_each_text_gets_its_own_output(
    texts: list[list[int]], whole: bool, budget: int, overlap: bool, dropped: set[int], pairs: bool
) -> None:
    loop = loop_of(whole=whole, budget=max(budget, LONGEST) if whole else budget, overlap=overlap)
    for number, tokens in enumerate(texts):
        assert loop.scheduler.submit(pool(number, tokens, second_text=len(tokens) // 2 if pairs else 0), number)
    found: dict[int, tuple[float, ...]] = {}
    failed: set[int] = set()

    def each(output: StepOutput) -> None:
        if dropped:
            loop.scheduler.abort(dropped.pop().to_bytes(16, "big"))
        assert output.pooled is not None or not len(output.client)
        for row, number in enumerate(output.client.tolist()):
            assert number not in found and output.pooled is not None
            assert output.finish[row] and output.ids[row].tobytes() == number.to_bytes(16, "big")
            found[number] = tuple(output.pooled[row])
        failed.update(failure.client for failure in output.failures)

    aborted = {number for number in dropped if number < len(texts)}
    run(loop, each)
    for number, tokens in enumerate(texts):
        if number in found:
            assert found[number] == (sum(tokens), len(tokens), len(tokens) // 2 if pairs else 0)
        elif number not in aborted:
            assert number in failed and 13 in tokens
    assert loop.scheduler.table.num_in_use == 0 and loop.scheduler.counters.generated_tokens == 0
    engine = loop.engine
    assert isinstance(engine, TextEngine)
    if whole:
        assert all(plan.prefill_sample.all() and not plan.prefill_starts.any() for plan in engine.plans)


def test_a_long_text_delays_short_ones_by_a_step_and_is_not_overtaken_for_ever() -> None:
    loop = loop_of(whole=True, budget=LONGEST)
    order: list[int] = []
    lengths = [10, 10, LONGEST, 10, 10, 10, 10, 10]
    for number, length in enumerate(lengths):
        loop.scheduler.submit(pool(number, [1] * length), number)
    run(loop, lambda output: order.extend(output.client.tolist()))
    # The long one does not fit beside the first two, a short one does; then it goes first.
    assert order == [0, 1, 3, 2, 4, 5, 6, 7]


def test_shared_beginnings_are_computed_once() -> None:
    loop = loop_of(whole=False, budget=64, cache="radix")
    instruction = list(range(20, 20 + 3 * PAGE))
    cached: dict[int, int] = {}
    for number in range(3):
        loop.scheduler.submit(pool(number, [*instruction, number]), number)
        run(loop, lambda output: cached.update(zip(output.client.tolist(), output.cached.tolist(), strict=True)))
    assert cached == {0: 0, 1: 3 * PAGE, 2: 3 * PAGE}


def test_the_longest_text_has_all_tokens_of_the_context() -> None:
    loop = loop_of(whole=False, budget=8)
    loop.scheduler.submit(pool(0, [1] * LONGEST))
    outputs: list[StepOutput] = []
    run(loop, outputs.append)
    assert sum(len(output.client) for output in outputs) == 1
    with pytest.raises(RequestError) as error:
        loop.scheduler.submit(pool(1, [1] * (LONGEST + 1)))
    assert error.value.code == "context_length_exceeded"


def test_requests_of_another_task_are_refused() -> None:
    loop = loop_of(whole=True, budget=LONGEST)
    with pytest.raises(RequestError) as error:
        loop.scheduler.submit(submit_of(id=bytes(16), prompt=bytes(4), max_tokens=1, seed=0))
    assert error.value.code == "wrong_task" and "embed" in error.value.message


STEP = 0.020
"""Seconds."""


def busy_with_a_text(*, overlap: bool = True, budget: int = 48) -> tuple[StepLoop, TimedEngine]:
    """A loop that has measured steps, and has just launched another one."""
    loop = loop_of(whole=False, budget=budget, overlap=overlap, cache="radix")
    timed = TimedEngine(loop.engine, lambda plan: STEP)
    loop = StepLoop(loop.scheduler, timed, timed.clock)
    for number in range(5):
        loop.scheduler.submit(pool(number, [number + 20] * LONGEST))
        run(loop, lambda output: None)
    loop.scheduler.submit(pool(5, [40] * 20))
    loop.step()
    return loop, timed


def test_texts_that_arrive_while_a_step_runs_are_one_step_which_the_device_does_not_wait_for() -> None:
    loop, timed = busy_with_a_text()
    launched = timed.now
    outputs: list[StepOutput] = []
    for number in range(6, 9):
        spare = loop.spare_ms()
        assert spare > 0, "the device is busy, and the next step has room"
        timed.now += min(spare, 2) / 1000
        loop.scheduler.submit(pool(number, [40 + number] * 5))
    timed.now += loop.spare_ms() / 1000
    assert loop.spare_ms() == 0
    run(loop, outputs.append)
    assert sum(len(output.client) for output in outputs) == 4
    (running, _), (joint, _) = timed.durations[-2:]
    assert len(running.prefill_slots) == 1 and len(joint.prefill_slots) == 3
    assert timed.now == pytest.approx(launched + 2 * STEP)


def test_a_step_of_texts_is_launched_at_once_where_waiting_gains_nothing() -> None:
    assert busy_with_a_text(overlap=False)[0].spare_ms() == 0, "nothing runs between steps"
    loop, _ = busy_with_a_text()
    for number in range(6, 8):
        loop.scheduler.submit(pool(number, [40 + number] * 24))
    assert loop.spare_ms() == 0, "the texts fill a step"
    loop, _ = busy_with_a_text()
    for number in range(6, 10):
        loop.scheduler.submit(pool(number, [number]))
    assert loop.spare_ms() == 0, "the texts take all rows"
    unmeasured = loop_of(whole=False, budget=48)
    unmeasured.scheduler.submit(pool(0, [1] * 20))
    unmeasured.step()
    assert unmeasured.spare_ms() == 0, "how long the step takes is not known"
