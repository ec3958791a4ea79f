"""Conditions that must not change a model's numbers, and small sets of cases that cover them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from minisgl.toy.tiny import TINY_ARCHS

Prefix = Literal["naive", "cold", "hit"]
Company = Literal["alone", "others"]

UNLIMITED: Final = 1 << 20


@dataclass(frozen=True)
class Case:
    """Conditions under which the probe, the request whose numbers are compared, is served."""

    arch: str
    budget: int
    """Token budget of a step: prompts are computed in chunks of what decode rows leave of it."""
    prefix: Prefix
    """`naive`: without a prefix cache; `cold`: with an empty one; `hit`: an earlier request had most of the prompt."""
    overlap: bool
    page: int
    company: Company
    preemption: bool
    """The pool is too small, and the probe is preempted in the middle of its answer."""

    def __str__(self) -> str:
        parts = [
            self.arch,
            "unlimited" if self.budget == UNLIMITED else f"chunk{self.budget}",
            self.prefix,
            "overlap" if self.overlap else "serial",
            f"page{self.page}",
            self.company,
        ]
        return "-".join(parts + ["preempted"] * self.preemption)


AXES: Final[Mapping[str, Sequence[Hashable]]] = {
    "arch": TINY_ARCHS,
    "budget": (1, 7, 64, UNLIMITED),
    "prefix": ("naive", "cold", "hit"),
    "overlap": (True, False),
    "page": (1, 16, 64),
    "company": ("alone", "others"),
    "preemption": (False, True),
}
"""Values of each axis, by the names of Case's fields, in order."""

Combination = tuple[tuple[str, Hashable], ...]
"""Some axes with their values."""


def combinations(case: Case, size: int) -> set[Combination]:
    """The values of every combination of `size` axes in the case."""
    return set(itertools.combinations(asdict(case).items(), size))


def covering_array() -> list[Case]:
    """Cases that contain every pair of values of two axes, chosen greedily: always the case with the most new pairs,
    and of these the one with the most new triples.

    Always the same ones, grouped by architecture so that workers of a parallel run seldom need all references.
    """
    candidates = [Case(*values) for values in itertools.product(*AXES.values())]  # type: ignore[arg-type]
    pairs = {case: combinations(case, 2) for case in candidates}
    triples = {case: combinations(case, 3) for case in candidates}
    missing = set().union(*pairs.values())
    missing_triples = set().union(*triples.values())
    chosen: list[Case] = []
    while missing:
        case = max(candidates, key=lambda case: (len(pairs[case] & missing), len(triples[case] & missing_triples)))
        missing -= pairs[case]
        missing_triples -= triples[case]
        chosen.append(case)
    return sorted(chosen, key=lambda case: TINY_ARCHS.index(case.arch))


TWO_RANK_CASES: Final = (
    Case("llama", 64, "hit", True, 16, "others", True),
    Case("llama", 7, "cold", False, 1, "alone", False),
    Case("mistral", UNLIMITED, "naive", True, 64, "others", False),
    Case("mistral", 1, "hit", False, 16, "alone", True),
    Case("qwen2", 7, "hit", True, 64, "alone", True),
    Case("qwen2", UNLIMITED, "cold", False, 16, "others", True),
    Case("qwen3", 1, "cold", True, 1, "alone", True),
    Case("qwen3", 64, "naive", False, 64, "others", False),
    Case("qwen3-moe", 7, "cold", True, 16, "others", False),
    Case("qwen3-moe", 64, "hit", False, 1, "alone", True),
)
