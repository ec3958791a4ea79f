"""Logits processors of single rows (penalties, biases, masks) and their log-probability requests, as they travel in
`StepPlan.logits_processors`.

Few rows have any: a plan without them carries nothing, and an engine does nothing for it. The processors of a row come
in the plan in which it joins, with the row's whole history, so a preempted row continues exactly where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from minisgl.wire.plan import EMPTY, FloatArray, IntArray, PlanError

_HEADER: Final = 13
_LATE: Final = 1 << 30
"""Bit of a header's slot."""
_NAMED: Final = 1 << 29
"""Bit of the slot of a row with `logprob_ids`, which are the last of its masked ids."""


@dataclass(frozen=True, slots=True)
class RowLogitsProcessors:
    """Logits processors and log-probability requests of one row."""

    slot: int
    prompt_length: int
    repetition: float
    frequency: float
    presence: float
    min_tokens: int
    """The row does not sample any of `masked_ids` before it has generated this number of tokens."""
    logprobs: int
    """Number of most likely tokens reported beside the sampled one; −1: no log-probabilities."""
    prompt_logprobs: int
    """The same for prompt tokens from index `prompt_logprobs_from` on."""
    prompt_logprobs_from: int
    masked_ids: IntArray
    bias_ids: IntArray
    """Without duplicates."""
    bias_values: FloatArray
    prompt: IntArray
    """Empty where neither penalties nor log-probabilities of the prompt need it."""
    output: IntArray
    """Tokens generated before the row joined; empty where no penalty needs them."""
    late: bool = False
    """The tokens of the row are sampled under masks, which depend on the token before: `Engine.sample`."""
    logprob_ids: IntArray = field(default_factory=lambda: EMPTY)
    """Tokens that are reported in place of the most likely ones: `logprobs` of them, or none."""

    @property
    def penalized(self) -> bool:
        """True when a penalty changes the row's logits."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    def encode(self) -> IntArray:
        """The row as int32 numbers; rows are concatenated to `StepPlan.logits_processors`."""
        assert len(self.logprob_ids) in (0, self.logprobs)
        masked_ids = np.concatenate((self.masked_ids, self.logprob_ids))
        floats = np.array((self.repetition, self.frequency, self.presence), np.float32).view(np.int32)
        header = (
            self.slot | _LATE * self.late | _NAMED * (len(self.logprob_ids) > 0),
            self.prompt_length,
            *floats.tolist(),
            self.min_tokens,
            self.logprobs,
            self.prompt_logprobs,
            self.prompt_logprobs_from,
            *map(len, (masked_ids, self.bias_ids, self.prompt, self.output)),
        )
        parts = (header, masked_ids, self.bias_ids, self.bias_values.view(np.int32), self.prompt, self.output)
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def decode_logits_processors(encoded: IntArray) -> list[RowLogitsProcessors]:
    """The rows of `StepPlan.logits_processors`. Raises PlanError when the sizes do not add up."""
    rows = []
    while len(encoded):
        if len(encoded) < _HEADER:
            raise PlanError("the logits processors of a plan are truncated")
        header = encoded[:_HEADER]
        masked, bias, prompt, output = header[9:].tolist()
        sizes = (masked, bias, bias, prompt, output)
        if min(sizes) < 0 or _HEADER + sum(sizes) > len(encoded):
            raise PlanError("the sizes of a plan's logits processors do not add up to their length")
        slot, prompt_length = header[:2].tolist()
        fields: list[Any] = [slot & ~(_LATE | _NAMED), prompt_length]
        fields += *header[2:5].view(np.float32).tolist(), *header[5:9].tolist()
        masked_ids, bias_ids, biases, *history, encoded = np.split(encoded[_HEADER:], np.cumsum(sizes))
        named = int(header[6]) if slot & _NAMED else 0
        if not 0 <= named <= masked:
            raise PlanError("a row of a plan reports more tokens than it has")
        masked_ids, logprob_ids = masked_ids[: masked - named], masked_ids[masked - named :]
        fields += masked_ids, bias_ids, biases.view(np.float32), *history, slot & _LATE != 0, logprob_ids
        rows.append(RowLogitsProcessors(*fields))
    return rows
