"""One rank against Hugging Face transformers: whatever the scheduler does to a request, its numbers stay the same.

All of it runs in audit mode: pages are handed out in shuffled order, and those that nobody owns are full of NaN, so a
read of memory that is not the request's own shows in its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.numerics.cases import TWO_RANK_CASES, Case, covering_array
from support.numerics.compare import check_features, check_numbers, check_rounded_numbers
from support.numerics.ranks import load
from support.numerics.reference import Reference
from support.numerics.run import serve_case
from support.numerics.workload import GREEDY, workload


@pytest.mark.parametrize("case", covering_array(), ids=str)
def test_numbers_are_those_of_transformers(
    case: Case,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    record_property: Callable[[str, object], None],
) -> None:
    work = workload(case)
    outcome, stats = serve_case(case, work, checkpoint(case.arch))
    worst = check_numbers(work, outcome, reference(case.arch))
    record_property("worst logit difference, one rank", worst)
    check_features(case, work, outcome, stats)


@pytest.mark.parametrize("case", TWO_RANK_CASES, ids=str)
def test_numbers_in_bfloat16_are_near(case: Case, checkpoint: Callable[[str], Path]) -> None:
    work = workload(case)
    outcome, _ = serve_case(case, work, checkpoint(case.arch), dtype="bfloat16")
    check_rounded_numbers(work, outcome, load(checkpoint(case.arch)))


def test_the_step_that_runs_on_behind_a_stop_token_changes_nothing(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    """With overlap the host learns of a stop token one step late: the row has run on, and its pages are still its."""
    case = Case("llama", 64, "cold", True, 1, "others", False)
    work = workload(case)
    asks = list(work.asks)
    for number, answer in enumerate(reference(case.arch).answers(asks)):
        if number != work.probe:
            stop = msgspec.structs.replace(GREEDY, stop_token_ids=(answer.tokens[answer.decided // 2],))
            asks[number] = replace(asks[number], sampling=stop)
    work = replace(work, asks=tuple(asks))
    outcome, _ = serve_case(case, work, checkpoint(case.arch))
    check_numbers(work, outcome, reference(case.arch))
    dropped = len(outcome.logits) - sum(map(len, outcome.tokens))
    assert dropped >= len(asks) // 2, "hardly a request was a step ahead of its stop token"
