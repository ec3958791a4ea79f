"""Histograms that cost a fraction of a microsecond to observe, with the bucket edges of vLLM, so that dashboards made
for it show ours (vllm/v1/metrics: the edges are part of the metrics' contract)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from minisgl.wire.messages import QUEUE_TIME_EDGES

TTFT_EDGES: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_EDGES: Final = QUEUE_TIME_EDGES
COUNT_EDGES: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Tokens of a request: 1, 2, 5, 10, … 500,000."""
LAG_EDGES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of observed values by bucket, and their sum."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.sum = 0.0
        self._counts = [0] * (len(edges) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @classmethod
    def from_counts(cls, edges: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Make a histogram from counts that another process kept: one for each edge, then one for larger values."""
        histogram = cls(edges)
        histogram._counts = list(counts)
        histogram.sum = total
        return histogram

    def cumulative(self) -> list[int]:
        """Return the number of values up to each edge, and then of all values."""
        return list(accumulate(self._counts))
