"""Two ranks compared with Hugging Face transformers: a process each, as deployed, in ten cases that cover every
architecture and every feature of the scheduler. Audit mode also compares the ranks' tokens in every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.wire.messages import SamplingParams
from support.numerics.cases import TWO_RANK_CASES, Case
from support.numerics.compare import check_features, check_numbers
from support.numerics.rank_pairs import SecondRank
from support.numerics.ranks import load
from support.numerics.reference import Reference
from support.numerics.run import serve_case
from support.numerics.workload import workload

LARGEST_SHARE = 0.6
"""Share of the parameters of one rank that each of two holds: half, and the replicated ones."""


@pytest.mark.parametrize("case", TWO_RANK_CASES, ids=str)
def test_logits_and_tokens_match_transformers(
    case: Case,
    second_rank: SecondRank,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    work = workload(case)
    outcome, pair = second_rank.serve(case, work, checkpoint(case.arch), tmp_path)
    worst = check_numbers(work, outcome, reference(case.arch))
    record_property("worst logit difference, two ranks", worst)
    check_features(case, work, outcome, pair.rank0.stats)

    whole = load(checkpoint(case.arch)).parameter_bytes
    first, second = pair.followed
    assert max(first.parameter_bytes, second.parameter_bytes) <= LARGEST_SHARE * whole
    assert first.results == second.results, "the ranks had other rows or other tokens"


def test_seeded_tokens_match_those_of_one_rank(
    second_rank: SecondRank, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    case = Case("qwen3", 64, "cold", True, 16, "others", False)
    work = workload(case, SamplingParams(temperature=1.1, top_k=50, top_p=0.95, min_p=0.02, seed=7))
    alone, _ = serve_case(case, work, checkpoint(case.arch))
    together, pair = second_rank.serve(case, work, checkpoint(case.arch), tmp_path)
    assert together.tokens == alone.tokens
    assert pair.followed[0].results == pair.followed[1].results
