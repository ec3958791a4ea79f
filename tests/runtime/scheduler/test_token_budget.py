"""Prompt tokens beside decode rows: bounded by the time that the step takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from minisgl.scheduler.scheduler import BACKLOG_PATIENCE
from minisgl.scheduler.step_times import TILE, StepCosts, StepGraphs, StepTimes, StepWork
from minisgl.scheduler.token_budget import CONTINUED_SHARE, LEAST_SHARE, LEAST_TOKENS, TokenBudget
from minisgl.wire.plan import StepPlan
from support.scheduling import VOCAB, Harness

TARGET_MS = 30.0
LARGE = StepCosts(fixed=2e-3, token=4.5e-5, pair=1.5e-9, context=4e-8)
"""A step of a model with 14B parameters."""


def harness(costs: StepCosts = LARGE, *, target_itl_ms: float = TARGET_MS, overlap: bool = True) -> Harness:
    return Harness(
        pages=4096,
        page_size=16,
        rows=16,
        max_model_len=4096,
        budget=8192,
        overlap=overlap,
        audit=False,
        checks=False,
        target_itl_ms=target_itl_ms,
        step_seconds=lambda plan: costs.seconds(StepWork.of(plan, ())),
    )


def prompt(length: int, first: int) -> list[int]:
    draw = random.Random(first)
    return [first % VOCAB, *(draw.randrange(VOCAB) for _ in range(length - 1))]


def arrive(driven: Harness, lengths: list[int], *, stream: bool = True, tokens: int = 8) -> None:
    """Let prompts arrive one after the other, each some steps after the one before, and run until all have ended."""
    for number, length in enumerate(lengths):
        driven.submit(prompt(length, number), tokens, ignore_eos=True, stream=stream)
        for _ in range(3):
            driven.step()
    driven.run()
    for answer in driven.answers.values():
        assert answer.tokens == answer.expected()


def mixed(driven: Harness) -> list[tuple[StepPlan, float]]:
    return [(plan, took) for plan, took in driven.timed.durations if len(plan.decode_slots) and len(plan.prefill_slots)]


COSTS = st.builds(
    StepCosts,
    fixed=st.floats(1e-4, 1e-2),
    token=st.floats(2e-6, 1e-4),
    pair=st.floats(0, 2e-9),
    context=st.floats(0, 1e-7),
)


@settings(max_examples=25, deadline=None)
@given(COSTS, st.lists(st.integers(50, 1500), min_size=4, max_size=12), st.booleans())
def test_a_decode_row_waits_for_a_bounded_time(costs: StepCosts, lengths: list[int], overlap: bool) -> None:
    """Steps of a linear model are expected exactly, but for the ridge of the fit, once some were measured."""
    driven = harness(costs, overlap=overlap)
    arrive(driven, [1500, 100, 700, 300, *lengths])
    for plan, took in mixed(driven)[8:]:
        alone = costs.seconds(StepWork(TILE, 0.0, StepWork.of(plan, ()).context))
        least = alone / (1 - LEAST_SHARE) + TILE * costs.token + LEAST_TOKENS * costs.pair * 1600
        assert took <= 1.15 * max(BACKLOG_PATIENCE * TARGET_MS / 1000, least)


@settings(max_examples=25, deadline=None)
@given(COSTS, st.lists(st.integers(50, 1500), min_size=4, max_size=12))
def test_no_prompt_starves(costs: StepCosts, lengths: list[int]) -> None:
    """Every step with prompts computes at least some tokens, or the last ones of a prompt, even for a tiny target."""
    driven = harness(replace(costs, fixed=costs.fixed + 0.1), target_itl_ms=0.001)
    arrive(driven, lengths)
    for plan, _ in mixed(driven):
        assert len(plan.prefill_tokens) >= LEAST_TOKENS or plan.prefill_sample.any()


def test_prompts_are_computed_in_the_order_of_arrival() -> None:
    driven = harness()
    arrive(driven, [100, 900])
    driven.submit(prompt(8, 50), 60, ignore_eos=True)
    driven.step()
    answers = [driven.submit(prompt(1200, 60 + number), 4, ignore_eos=True) for number in range(3)]
    order = []
    while driven.scheduler.has_work:
        driven.step()
        order += [answer for answer in answers if answer.tokens and answer not in order]
    assert [id(answer) for answer in order] == [id(answer) for answer in answers]


@pytest.mark.parametrize(("stream", "longest"), [(True, 0.035), (False, 0.06)])
def test_rows_that_nobody_watches_may_wait(stream: bool, longest: float) -> None:
    driven = harness()
    arrive(driven, [1500, 100, 700, 300, 900])
    driven.timed.durations.clear()
    arrive(driven, [200, 1400, 1300], stream=stream, tokens=40)
    slowest = max(took for _, took in mixed(driven))
    assert longest * 0.7 < slowest < longest * 1.3


def test_steps_may_take_longer_while_many_prompts_wait() -> None:
    driven = harness()
    arrive(driven, [1500, 100, 700, 300, 900])
    driven.submit(prompt(8, 50), 60, ignore_eos=True)
    driven.step()
    driven.timed.durations.clear()
    for number in range(4):
        driven.submit(prompt(1200, 60 + number), 4, ignore_eos=True)
    driven.run()
    slowest = [took for _, took in mixed(driven)]
    assert 0.045 < max(slowest) <= 1.1 * BACKLOG_PATIENCE * TARGET_MS / 1000
    assert slowest[-1] < 1.1 * TARGET_MS / 1000, "the last prompt waits alone"


@pytest.mark.parametrize("continued", [False, True])
def test_answers_of_a_lost_engine_get_most_of_a_step_beside_streams(continued: bool) -> None:
    costs = replace(LARGE, fixed=20e-3)
    driven = harness(costs)
    arrive(driven, [1500, 100, 700, 300, 900])
    driven.submit(prompt(8, 50), 60, ignore_eos=True)
    driven.step()
    driven.timed.durations.clear()
    for number in range(4):
        output = np.array(prompt(600, number), np.int32).tobytes() if continued else b""
        driven.submit(prompt(1200 - len(output) // 4, 60 + number), 604, ignore_eos=True, output=output)
    while driven.scheduler.table.in_prefill or len(driven.scheduler.queue):
        driven.loop.step()
    longest = max(took for _, took in mixed(driven))
    alone = costs.seconds(StepWork(TILE))
    if continued:
        assert 0.8 / (1 - CONTINUED_SHARE) < longest / alone <= 1.1 / (1 - CONTINUED_SHARE)
    else:
        assert longest <= 1.1 * BACKLOG_PATIENCE * TARGET_MS / 1000


def test_a_step_is_not_limited_without_decode_rows() -> None:
    driven = harness()
    arrive(driven, [1000, 1000])
    driven.timed.durations.clear()
    for number in range(4):
        driven.submit(prompt(1000, 80 + number), 4, ignore_eos=True)
    driven.step()
    assert len(driven.timed.durations[0][0].prefill_tokens) == 4000
    driven.run()


GRAPHS = ((32, 96), (32, 224), (32, 352), (32, 480), (32, 736))


def measured(costs: StepCosts) -> StepTimes:
    times = StepTimes()
    for tokens in range(100, 8100, 500):
        work = StepWork(tokens, tokens * tokens / 2, 100 * (tokens % 11))
        times.observe(work, costs.seconds(work))
    return times


def limited(graphs: StepGraphs = (), tokens: int = 8192) -> TokenBudget:
    budget = TokenBudget(tokens, 10, graphs)
    budget.limit_seconds(TARGET_MS / 1000, measured(LARGE), 20_000)
    return budget


def test_a_chunk_fills_the_largest_graph_or_the_last_tile_that_fits() -> None:
    # 512 tokens with 10 decode rows: 26 ms; 640: 32 ms.
    assert limited().grant(0, 5000) == 502
    # Without a graph only if that makes the step larger.
    assert limited(GRAPHS[:3]).grant(0, 5000) == 502
    assert limited(GRAPHS[:2]).grant(0, 5000) == 502
    assert limited(GRAPHS).grant(0, 5000) == 480
    # The end of a prompt is not cut off, unless it is in the next tile.
    assert limited().grant(0, 490) == 490
    assert limited().grant(0, 510) == 502


def test_later_prompts_get_what_earlier_ones_leave() -> None:
    for graphs, last in (((), 202), (GRAPHS, 180)):
        budget = limited(graphs)
        assert budget.grant(0, 300) == 300
        assert not budget.is_spent
        assert budget.grant(0, 5000) == last
        assert budget.is_spent


def test_no_prompt_begins_with_a_few_tokens() -> None:
    budget = limited()
    assert budget.grant(0, 490) == 490
    assert budget.is_spent
    budget = limited()
    assert budget.grant(0, 400) == 400
    # Known only when it is admitted: the prompt has a long prefix, and few tokens behind it take the rest of the time.
    assert not budget.is_spent
    assert budget.grant(100_000, 1000) == 0
    assert budget.is_spent


def test_the_number_of_tokens_is_limited_too() -> None:
    budget = TokenBudget(100)
    assert (budget.grant(0, 60), budget.is_spent, budget.grant(0, 60), budget.is_spent) == (60, False, 40, True)
    assert limited(tokens=50).grant(0, 1000) == 50
