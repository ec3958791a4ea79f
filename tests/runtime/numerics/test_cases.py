"""The cases cover all combinations that they claim."""

from __future__ import annotations

import itertools

from support.numerics.cases import AXES, TWO_RANK_CASES, Case, combinations, covering_array


def test_every_pair_of_values_of_two_axes_is_in_a_case() -> None:
    cases = covering_array()
    met = {pair for case in cases for pair in combinations(case, 2)}
    for (a, of_a), (b, of_b) in itertools.combinations(AXES.items(), 2):
        for x, y in itertools.product(of_a, of_b):
            assert ((a, x), (b, y)) in met
    assert len(cases) == len(set(cases)) <= 30
    assert cases == covering_array()


def test_cases_of_two_ranks_contain_every_value_and_every_architecture_twice() -> None:
    assert len(set(TWO_RANK_CASES)) == 10
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in TWO_RANK_CASES} == set(values)
    for arch in AXES["arch"]:
        cases: list[Case] = [case for case in TWO_RANK_CASES if case.arch == arch]
        assert [case.overlap for case in cases].count(True) == len(cases) / 2 == 1
