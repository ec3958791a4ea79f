"""Expected times of steps, from measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.scheduler.step_times import StepCosts, StepTimes, StepWork, full_prompt_tokens, padded_tokens
from support.plans import Segment, make_plan


def work(tokens: int, start: int = 0, context: int = 0) -> StepWork:
    return StepWork(tokens, tokens * (start + tokens / 2), context)


TRUE_COSTS = st.builds(
    StepCosts,
    fixed=st.floats(1e-5, 3e-2),
    token=st.floats(1e-6, 1e-4),
    pair=st.floats(0, 2e-9),
    context=st.floats(0, 5e-8),
)
WORKS = st.lists(
    st.builds(
        work,
        tokens=st.integers(1, 8192),
        start=st.sampled_from([0, 64, 4096]),
        context=st.integers(0, 200_000),
    ),
    min_size=8,
    max_size=40,
)


def observed(costs: StepCosts, works: list[StepWork]) -> StepTimes:
    times = StepTimes()
    for each in works:
        times.observe(each, costs.seconds(each))
    return times


@settings(deadline=None)
@given(TRUE_COSTS, WORKS)
def test_the_median_error_of_measured_steps_is_small(costs: StepCosts, works: list[StepWork]) -> None:
    times = observed(costs, works)
    errors = sorted(abs(times.costs.seconds(each) / costs.seconds(each) - 1) for each in works)
    assert errors[len(errors) // 2] < 0.1


@settings(deadline=None)
@given(st.lists(st.tuples(WORKS.map(lambda works: works[0]), st.floats(0, 1e3)), min_size=1, max_size=70))
def test_costs_of_any_measurements_are_finite_and_not_negative(steps: list[tuple[StepWork, float]]) -> None:
    times, again = StepTimes(), StepTimes()
    for step, seconds in steps:
        times.observe(step, seconds)
        again.observe(step, seconds)
    assert times.costs is not None
    assert all(0 <= cost < float("inf") for cost in (times.costs.fixed, times.costs.token, times.costs.pair))
    assert times.costs == again.costs


@pytest.mark.parametrize("outlier", [0.0, 1e-3, 2.0])
@pytest.mark.parametrize("place", [0, 10, 19])
def test_one_step_of_another_length_moves_the_model_little(outlier: float, place: int) -> None:
    costs = StepCosts(fixed=2e-3, token=4e-5, pair=1e-9, context=4e-8)
    times = StepTimes()
    for number in range(20):
        each = work(100 + 50 * number, context=1000 * number)
        times.observe(each, outlier if number == place else costs.seconds(each))
    each = work(500, context=10_000)
    assert times.costs.seconds(each) == pytest.approx(costs.seconds(each), rel=0.15)


def test_a_lasting_change_is_learned() -> None:
    before = StepCosts(fixed=2e-3, token=4e-5, pair=0.0, context=0.0)
    after = StepCosts(fixed=3e-2, token=4e-5, pair=0.0, context=0.0)
    times = StepTimes()
    for number in range(160):
        each = work(100 + 53 * number % 400)
        times.observe(each, (before if number < 80 else after).seconds(each))
    assert times.costs.seconds(work(300)) == pytest.approx(after.seconds(work(300)), rel=0.05)


def test_a_step_without_prompts_is_expected_to_take_as_long_as_the_last_ones() -> None:
    times = StepTimes()
    plain = work(0)
    assert times.decode_seconds == 0
    for seconds in (0.5, 0.012, 0.011, 0.013, 0.012):
        times.observe(plain, seconds)
    assert times.decode_seconds == 0.011
    assert times.costs is None


def test_the_work_of_a_plan() -> None:
    plan = make_plan(0, decode=[(0, 9), (1, 19)], prefill=[Segment(2, 0, range(4)), Segment(3, 10, range(2))])
    assert StepWork.of(plan, ()) == StepWork(128, 4 * 2 + 2 * 11, 28)
    assert StepWork.of(plan, ((0, 8), (32, 352))).tokens == 384
    assert StepWork.of(make_plan(1, decode=[(0, 9)]), ()) == StepWork(0, rows=1)


def test_steps_have_the_size_of_their_graph_or_of_whole_tiles() -> None:
    graphs = ((0, 64), (32, 96), (0, 192), (32, 224), (256, 256))
    assert [padded_tokens(0, tokens, graphs) for tokens in (64, 65, 129, 193, 300)] == [128, 128, 256, 256, 384]
    assert [padded_tokens(30, tokens, graphs) for tokens in (1, 97, 225, 257)] == [128, 256, 512, 384]
    assert padded_tokens(33, 1, graphs) == 512
    assert full_prompt_tokens(30, 300, graphs) == 224
    assert [full_prompt_tokens(33, tokens, graphs) for tokens in (300, 512, 640)] == [0, 479, 607]
    assert full_prompt_tokens(10, 600, ()) == 502


@given(st.integers(0, 300), st.integers(1, 2000), st.lists(st.tuples(st.integers(0, 256), st.integers(1, 1000))))
def test_a_full_step_is_padded_to_no_more_than_allowed(rows: int, tokens: int, graphs: list[tuple[int, int]]) -> None:
    graphs.sort(key=sum)
    full = full_prompt_tokens(rows, tokens, graphs)
    if full > 0:
        assert padded_tokens(rows, full, graphs) <= tokens
