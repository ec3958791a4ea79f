"""Which endpoint a request is sent to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

MAX_ENDPOINTS: Final = 3
"""Endpoints that one request may be tried at: it may be what they die of."""


class Picks:
    """Requests in flight by endpoint, as far as this picker has sent them there."""

    def __init__(self, most: int = MAX_ENDPOINTS) -> None:
        """`most`: endpoints that a request gets."""
        self._most = most
        self.in_flight: Counter[str] = Counter()
        self._turn = 0

    def order(self, candidates: Sequence[str]) -> list[str]:
        """Return the endpoints of a request: the one with the fewest requests in flight, then those for another try.
        Of equal ones each has its turn. `candidates`: at least one."""
        turn = self._turn % len(candidates)
        self._turn += 1
        rotated = [*candidates[turn:], *candidates[:turn]]
        return sorted(rotated, key=lambda each: self.in_flight[each])[: self._most]


class Pick:
    """One request in flight. The caller must `end` it."""

    def __init__(self, picks: Picks, endpoints: Sequence[str]) -> None:
        """`endpoints`: as they were ordered."""
        self.is_served = False
        """It is known which endpoint serves the request."""
        self._picks = picks
        self._at = endpoints[0]
        picks.in_flight[self._at] += 1

    def served_by(self, endpoint: str) -> None:
        """Count the request for the endpoint that serves it, after others have failed."""
        self.end()
        self._at, self.is_served = endpoint, True
        self._picks.in_flight[endpoint] += 1

    def end(self) -> None:
        in_flight = self._picks.in_flight
        in_flight[self._at] -= 1
        if in_flight[self._at] <= 0:
            del in_flight[self._at]
