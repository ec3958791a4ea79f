"""Kinds of metrics: values with a name and a help text. A histogram costs a fraction of a microsecond to observe."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final


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
        self.template: tuple[str, str] | None = None
        """Labels with which a page was last rendered, and its lines with `%s` for the values; kept by the page."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times


HTTP_EDGES: Final = (0.1, 0.5, 1.0)


class HttpRequests:
    """Answered HTTP requests: their number by route, method and class of status, and their times by route and method.
    The names are those of the instrumentation that servers with FastAPI have."""

    total_name: Final = "http_requests_total"
    seconds_name: Final = "http_request_duration_seconds"

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, str, str]] = Counter()
        self.seconds: dict[tuple[str, str], Histogram] = {}

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. Each pair of `route` and `method` is kept, so both are those of `RoutePaths`."""
        self.totals[route, method, f"{status // 100}xx"] += 1
        if (route, method) not in self.seconds:
            self.seconds[route, method] = Histogram(self.seconds_name, "Time to the end of the response.", HTTP_EDGES)
        self.seconds[route, method].observe(seconds)
