"""A request with a seed samples the same tokens in any batch, since random numbers depend on (seed, position) only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest

from minisgl.wire.messages import SamplingParams
from support.numerics.cases import UNLIMITED, Case
from support.numerics.run import is_disturbed, serve_case
from support.numerics.workload import cached_tokens, workload

ALONE = Case("llama", UNLIMITED, "cold", False, 16, "alone", False)

SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.0, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=-(2**63)),
    "top-k": SamplingParams(temperature=1.5, top_k=20, seed=2**63 - 1),
    "all filters": SamplingParams(temperature=1.1, top_k=50, top_p=0.95, min_p=0.02, seed=7),
}

DISTURBED = [
    ("temperature", Case("llama", UNLIMITED, "cold", True, 16, "others", False)),
    ("temperature", Case("llama", 7, "hit", False, 1, "alone", True)),
    ("top-p", Case("llama", 7, "cold", True, 64, "alone", False)),
    ("top-p", Case("llama", 64, "hit", True, 16, "others", True)),
    ("top-k", Case("llama", 64, "naive", False, 64, "others", False)),
    ("top-k", Case("llama", UNLIMITED, "hit", True, 1, "alone", True)),
    ("all filters", Case("llama", 64, "naive", True, 1, "others", True)),
    ("all filters", Case("llama", 1, "hit", True, 16, "alone", False)),
]


@pytest.fixture(scope="module")
def answer(checkpoint: Callable[[str], Path]) -> Callable[[Case, SamplingParams], list[int]]:
    """The probe's tokens."""

    @cache
    def run(case: Case, sampling: bytes) -> list[int]:
        work = workload(case, msgspec.json.decode(sampling, type=SamplingParams))
        outcome, _ = serve_case(case, work, checkpoint(case.arch))
        assert outcome.cached[work.probe] == cached_tokens(case)
        assert is_disturbed(outcome) == case.preemption
        return outcome.tokens[work.probe]

    return lambda case, sampling: run(case, msgspec.json.encode(sampling))


@pytest.mark.parametrize(("sampling", "case"), DISTURBED, ids=str)
def test_tokens_match_those_of_the_request_alone(
    sampling: str, case: Case, answer: Callable[[Case, SamplingParams], list[int]]
) -> None:
    params = SAMPLINGS[sampling]
    assert answer(case, params) == answer(ALONE, params)


def test_another_seed_samples_other_tokens(answer: Callable[[Case, SamplingParams], list[int]]) -> None:
    answers = [answer(ALONE, params) for params in SAMPLINGS.values()]
    answers += [answer(ALONE, SamplingParams(temperature=1.0, seed=2)), answer(ALONE, SamplingParams(temperature=0.0))]
    assert len({tuple(tokens) for tokens in answers}) == len(answers)
