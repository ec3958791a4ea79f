"""One rank compared with Hugging Face transformers: no decision of the scheduler changes the numbers of a request.

All tests run in audit mode: pages are allocated in shuffled order, and free pages are full of NaN, so a
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
def test_logits_and_tokens_match_transformers(
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
def test_bfloat16_matches_float32_within_rounding(case: Case, checkpoint: Callable[[str], Path]) -> None:
    work = workload(case)
    outcome, _ = serve_case(case, work, checkpoint(case.arch), dtype="bfloat16")
    check_rounded_numbers(work, outcome, load(checkpoint(case.arch)))


def test_the_extra_step_behind_a_stop_token_changes_nothing(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    """With overlap the host knows of a stop token one step late: the row has run once more, on pages that it still
    owns."""
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
