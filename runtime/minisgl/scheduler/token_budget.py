"""Budget of a step's prompt tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from minisgl.scheduler.step_times import StepCosts, StepTimes, StepWork

LEAST_TOKENS: Final = 64
"""Prompt tokens that every step may have, however long it takes, so that no prompt starves."""
LEAST_SHARE: Final = 1 / 3
"""Share of a step's time for prompts below which it is not limited: a step reads all weights, and on some devices its
launch takes longer than its work, so a few tokens at a time would cost more than they spare others."""
BUCKET_SHARE: Final = 0.75
"""Share of a step's tokens that is left when they are cut down to the size of a graph."""
LEAST_CHUNK: Final = 32
"""A smaller part of a prompt waits for the next step."""


class TokenBudget:
    """Prompt tokens that still fit into a step, by their number and by the time that they take."""

    def __init__(self, tokens: int, buckets: Sequence[int] = ()) -> None:
        """At most `tokens`. `buckets`: ascending numbers of tokens for which the engine has a graph."""
        self._left = tokens
        self._granted = 0
        self._buckets = buckets
        self._costs: StepCosts | None = None
        self._seconds = 0.0
        self._least = 0

    def limit_seconds(self, seconds: float, times: StepTimes, decode_rows: int, decode_context: int) -> None:
        """Limit the step to about `seconds`, with the decode rows that it has already. Without measured steps there is
        no limit."""
        costs = times.costs
        if costs is None:
            return
        # Costs of much larger steps than the measured ones are a guess.
        self._left = min(self._left, max(2 * times.most_tokens, LEAST_TOKENS))
        base = costs.seconds(StepWork(0, decode_rows, 0.0, decode_context))
        self._costs = costs
        self._seconds = max(seconds - base, base * LEAST_SHARE / (1 - LEAST_SHARE))
        self._least = LEAST_TOKENS

    @property
    def is_spent(self) -> bool:
        """True when no further prompt should begin."""
        if self._costs is None or self._granted < self._least:
            return self._left <= 0
        return min(self._left, self._costs.tokens_within(self._seconds, 0)) < LEAST_CHUNK

    def grant(self, start: int, wanted: int) -> int:
        """Number of tokens that a prompt gets, of the `wanted` ones from position `start` on; 0 ends the step."""
        granted = min(wanted, self._left)
        if self._costs is not None:
            granted = min(granted, max(self._costs.tokens_within(self._seconds, start), self._least - self._granted))
        if granted < wanted:
            self._left = granted = self._fit_bucket(granted)
            if self._granted and granted < LEAST_CHUNK:
                self._left = granted = 0
        if self._costs is not None:
            added = StepWork(granted, 0, granted * (start + granted / 2), 0)
            self._seconds -= self._costs.seconds(added) - self._costs.fixed
        self._left -= granted
        self._granted += granted
        return granted

    def _fit_bucket(self, granted: int) -> int:
        """The most of these tokens with which the step fills a graph, if they are nearly all of them."""
        total = self._granted + granted
        index = bisect_right(self._buckets, total)
        if index in (0, len(self._buckets)) or self._buckets[index - 1] < max(BUCKET_SHARE * total, self._granted):
            return granted
        return self._buckets[index - 1] - self._granted
