"""Drafts in the scheduler: how many rows a request gets, and what it makes of what the engine accepts."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from minisgl.scheduler import drafts, shared_prefixes
from minisgl.wire.plan import StepPlan
from support.scheduling import Answer, Harness


def _requests(harness: Harness, count: int, tokens: int = 30) -> list[Answer]:
    random = np.random.default_rng(count)
    lengths = random.integers(1, 20, count).tolist()
    return [
        harness.submit(random.integers(0, 4, length).tolist(), tokens, seed=number, ignore_eos=number % 2 == 0)
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 70), (4, 20), (16, 40)])
def test_answers_are_those_without_drafts(overlap: bool, page_size: int, pages: int) -> None:
    harness = Harness(pages=pages, page_size=page_size, rows=4, drafts=7, draft_seed=1, overlap=overlap, budget=64)
    answers = [*_requests(harness, 12), *_requests(harness, 12)]
    harness.run()
    harness.check_idle()
    assert [answer.tokens for answer in answers] == [answer.expected() for answer in answers]
    # Those behind the end of an answer do not count.
    assert 5 < harness.scheduler.counters.accepted_draft_tokens <= harness.engine.accepted


def _width_of(step_seconds: Callable[[StepPlan], float], rows: int = 4) -> float:
    """Mean number of decode rows of a request, over the second half of a run."""
    harness = Harness(pages=400, page_size=16, rows=rows, drafts=7, budget=200, step_seconds=step_seconds)
    for answer in range(rows):
        harness.submit([1, 2, answer], 60, seed=answer, ignore_eos=True)
    harness.run()
    plans = [plan for plan, _ in harness.timed.durations if len(plan.widths)]
    return float(np.mean([plan.widths.mean() for plan in plans[len(plans) // 2 :]]))


def test_drafts_are_verified_where_they_save_time() -> None:
    # Half of the made-up drafts are right.
    assert _width_of(lambda plan: 0.01) > 4
    assert _width_of(lambda plan: 0.001 * len(plan.decode_slots)) < 1.2
    some = _width_of(lambda plan: 0.01 + 0.001 * max(len(plan.decode_slots) - 8, 0))
    assert 1.5 < some < 4


def test_no_drafts_are_verified_beside_prompts() -> None:
    harness = Harness(pages=400, page_size=16, rows=8, drafts=7, draft_seed=0, budget=4)
    for answer in range(8):
        harness.submit([answer] * 12, 20, ignore_eos=True)
    harness.run()
    mixed = [plan for plan, _ in harness.timed.durations if len(plan.prefill_slots) and len(plan.widths)]
    assert mixed and all(plan.widths.max() == 1 for plan in mixed)


def test_constrained_and_penalized_rows_have_no_drafts() -> None:
    harness = Harness(pages=400, page_size=16, rows=3, drafts=7, draft_seed=0, budget=200)
    penalized = harness.submit([1, 2], 30, ignore_eos=True, repetition_penalty=1.1)
    listed = harness.submit([3, 4], 30, ignore_eos=True, allowed_token_ids=(1, 2, 3))
    free = harness.submit([5, 6], 30, ignore_eos=True)
    harness.run()
    assert [len(answer.tokens) for answer in (penalized, listed, free)] == [30, 30, 30]
    widths = [plan.widths.tolist() for plan, _ in harness.timed.durations if len(plan.widths) == 3]
    slots = [
        plan.decode_slots[np.cumsum(plan.widths) - 1] for plan, _ in harness.timed.durations if len(plan.widths) == 3
    ]
    assert widths
    by_slot = np.array([np.array(width)[np.argsort(slot)] for width, slot in zip(widths, slots, strict=True)])
    assert by_slot[:, :2].max() == 1 and by_slot[:, 2].max() > 1


def test_counts_of_drafts_add_up() -> None:
    harness = Harness(pages=400, page_size=16, rows=4, drafts=7, draft_seed=3, budget=200)
    _requests(harness, 4)
    harness.run()
    counters = harness.scheduler.counters
    assert 0 < counters.accepted_draft_tokens <= counters.draft_tokens
    assert sum(counters.accepted_by_place) == counters.accepted_draft_tokens
    assert counters.accepted_by_place == sorted(counters.accepted_by_place, reverse=True)


def test_a_request_that_waits_for_pages_leaves_drafts_on() -> None:
    harness = Harness(pages=10, page_size=4, rows=4, max_model_len=40, drafts=7, draft_seed=0, budget=64)
    harness.submit([1, 2, 3], 30, ignore_eos=True)
    harness.submit([4] * 30, 8, ignore_eos=True)
    harness.run()
    waited = [plan for plan, _ in harness.timed.durations if len(plan.widths) == 1]
    assert any(plan.widths[0] > 1 for plan in waited[: len(waited) // 2])


def test_shared_prefixes_are_left_out_while_drafts_are_in_flight() -> None:
    shared = {"MIN_GROUP_ROWS": 2, "MIN_SAVED_TOKENS": 1, "MIN_SAVED_SHARE": 0.0}
    with mock.patch.multiple(shared_prefixes, **shared):
        harness = Harness(pages=400, page_size=4, rows=6, drafts=7, draft_seed=2, budget=200)
        prompt = [1, 2, 3, 0] * 4
        harness.submit(prompt, 2, ignore_eos=True)
        harness.run()
        for seed in range(6):
            harness.submit(prompt, 25, seed=seed, ignore_eos=True)
        harness.run()
    plans = [plan for plan, _ in harness.timed.durations]
    had_drafts = [len(plan.decode_slots) > len(plan.widths) > 0 for plan in plans]
    assert any(had_drafts)
    for before, plan, has_drafts in zip([False, *had_drafts], plans, had_drafts, strict=False):
        assert not len(plan.shared_prefixes) or not (before or has_drafts)


def test_rows_beyond_the_texts_of_a_plan_have_no_drafts() -> None:
    with mock.patch.object(drafts, "_MOST_TEXT_TOKENS", 30):
        harness = Harness(pages=400, page_size=16, rows=4, drafts=7, draft_seed=0, budget=200)
        answers = [harness.submit([number] * 12, 20, ignore_eos=True) for number in range(4)]
        harness.run()
    assert [answer.tokens for answer in answers] == [answer.expected() for answer in answers]
    first = harness.timed.durations[0][0]
    assert len(first.texts) <= 30 + 4 * 4
    widest = [plan.widths.tolist() for plan, _ in harness.timed.durations if len(plan.widths) == 4]
    assert sum(max(widths) > 1 for widths in zip(*widest, strict=True)) == 2


def test_counts_of_a_prediction_survive_a_preemption() -> None:
    harness = Harness(pages=10, page_size=4, rows=2, max_model_len=40, drafts=7, draft_seed=0, budget=64)
    prediction = np.array([1, 2, 3], np.int32).tobytes()
    for seed in range(2):
        harness.submit([seed] * 3, 30, seed=seed, ignore_eos=True, prediction=prediction)
    counts: dict[bytes, tuple[int, int]] = {}
    while harness.scheduler.has_work:
        if (output := harness.step()) is None:
            continue
        for row, found in output.predicted.items():
            before = counts.get(output.ids[row].tobytes(), (0, 0))
            assert found[0] >= before[0] and found[1] >= before[1]
            counts[output.ids[row].tobytes()] = found
    assert harness.scheduler.counters.preemptions
    assert sum(map(sum, counts.values()))
