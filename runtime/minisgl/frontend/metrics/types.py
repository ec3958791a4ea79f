"""Kinds of metrics: values with a name and a help text. A histogram costs a fraction of a microsecond to observe."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence


class Total:
    """A number that only grows."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.value = 0


class LabelledTotal(Counter[str]):
    """Numbers that only grow, by the value of one label."""

    def __init__(self, name: str, text: str, label: str, *, other_name: str = "") -> None:
        """`other_name`: name under which the numbers are reported a second time."""
        super().__init__()
        self.names = (name, other_name) if other_name else (name,)
        self.text = text
        self.label = label


class Histogram:
    """Counts of observed values by bucket, and their sum."""

    def __init__(self, name: str, text: str, edges: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.edges = tuple(edges)
        self.sum = 0.0
        self.counts = [0] * (len(edges) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times
