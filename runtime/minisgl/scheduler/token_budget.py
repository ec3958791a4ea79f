"""Budget of a step's prompt tokens."""

from __future__ import annotations

from typing import Final

from minisgl.engine.interface import MOST_PROMPTS
from minisgl.scheduler.step_times import StepCosts, StepGraphs, StepTimes, StepWork, full_prompt_tokens, padded_tokens

LEAST_TOKENS: Final = 64
"""Prompt tokens that every step may have, however long it takes, so that no prompt starves."""
LEAST_SHARE: Final = 1 / 3
"""Share of a step's time for prompts below which it is not limited: a step reads all weights, and on some devices its
launch takes longer than its work, so a few tokens at a time would cost more than they spare others."""
CONTINUED_SHARE: Final = 3 / 4
"""The same while answers wait that another engine began: their clients have had no token since its loss."""
UNMEASURED_TOKENS: Final = 512
"""Most prompt tokens of a limited step before any step with prompts was measured."""
LEAST_CHUNK: Final = 32
"""A smaller part of a prompt waits for the next step."""


class TokenBudget:
    """Prompt tokens that still fit into a step, by their number and by the time that they take."""

    def __init__(
        self, tokens: int, decode_rows: int = 0, graphs: StepGraphs = (), most_prompts: int = MOST_PROMPTS
    ) -> None:
        """At most `tokens` of `most_prompts` beside `decode_rows`."""
        self._left = tokens
        self._prompts_left = most_prompts
        self._granted = 0
        self._rows = decode_rows
        self._graphs = graphs
        self._costs: StepCosts | None = None
        self._seconds = 0.0
        """For products of all tokens, and for attention of the prompts that are not granted yet."""
        self._least = 0

    def limit_seconds(
        self, seconds: float, times: StepTimes, decode_context: int, least_share: float = LEAST_SHARE
    ) -> None:
        """Limit the step to about `seconds`, but leave prompts `least_share` of its time; its decode rows attend to
        `decode_context` tokens."""
        costs = times.costs
        if costs is None:
            self._left = min(self._left, UNMEASURED_TOKENS)
            return
        # Costs of much larger steps than the measured ones are a guess.
        self._left = min(self._left, max(2 * times.most_tokens, LEAST_TOKENS))
        base = costs.seconds(StepWork(0, 0.0, decode_context))
        rows = costs.token * padded_tokens(self._rows, 0, ())
        self._costs = costs
        self._seconds = max(seconds, (base + rows) / (1 - least_share)) - base
        self._least = LEAST_TOKENS

    @property
    def left(self) -> int:
        """Tokens that a step without a limit of its time has left."""
        return self._left

    @property
    def is_spent(self) -> bool:
        """True when no further prompt should begin."""
        if self._left <= 0 or not self._prompts_left:
            return True
        if self._costs is None or self._granted < self._least:
            return False
        return self._full(self._costs, 0) - self._granted < LEAST_CHUNK

    def grant(self, start: int, wanted: int) -> int:
        """Number of tokens that a prompt gets, of the `wanted` ones from position `start` on; 0 ends the step."""
        granted = min(wanted, self._left)
        if self._costs is not None:
            most = max(self._full(self._costs, start), self._least, self._granted) - self._granted
            if most < granted:
                granted = most if most >= LEAST_CHUNK or not self._granted else 0
                self._left = granted
            self._seconds -= self._costs.pair * granted * (start + granted / 2)
        self._left -= granted
        self._granted += granted
        self._prompts_left -= granted > 0
        return granted

    def _full(self, costs: StepCosts, start: int) -> int:
        """The most prompt tokens of the step for whose products there is time, and for the attention of those that are
        not granted yet, from position `start` on."""
        # token · (known + n) + pair · n · (start + n / 2) = seconds
        known = self._rows + self._granted
        seconds = self._seconds - costs.token * known
        linear = costs.token + costs.pair * start
        root = max(linear * linear + 2 * costs.pair * seconds, 0.0) ** 0.5
        n = 2 * seconds / (linear + root) if linear else self._left
        return full_prompt_tokens(self._rows, int(known + n), self._graphs)
