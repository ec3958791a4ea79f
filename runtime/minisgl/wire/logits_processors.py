"""Logits processors of single rows (penalties, biases, masks) and their log-probability requests, as they travel in
`StepPlan.logits_processors`.

Few rows have any: a plan without them carries nothing, and an engine does nothing for it. The processors of a row come
in the plan in which it joins, with the row's whole history, so a preempted row continues exactly where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

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
    floats = encoded.view(np.float32)
    begin = 0
    while begin < len(encoded):
        at = begin + _HEADER
        if at > len(encoded):
            raise PlanError("the logits processors of a plan are truncated")
        header: list[int] = encoded[begin:at].tolist()
        slot, prompt_length, *_, min_tokens, tops, prompt_tops, prompt_from, masked, biases, prompt, output = header
        if min(masked, biases, prompt, output) < 0 or at + masked + 2 * biases + prompt + output > len(encoded):
            raise PlanError("the sizes of a plan's logits processors do not add up to their length")
        named = tops if slot & _NAMED else 0
        if not 0 <= named <= masked:
            raise PlanError("a row of a plan reports more tokens than it has")
        repetition, frequency, presence = floats[begin + 2 : begin + 5].tolist()
        bias_at = at + masked
        prompt_at = bias_at + 2 * biases
        output_at = prompt_at + prompt
        end = output_at + output
        rows.append(
            RowLogitsProcessors(
                slot=slot & ~(_LATE | _NAMED),
                prompt_length=prompt_length,
                repetition=repetition,
                frequency=frequency,
                presence=presence,
                min_tokens=min_tokens,
                logprobs=tops,
                prompt_logprobs=prompt_tops,
                prompt_logprobs_from=prompt_from,
                masked_ids=encoded[at : bias_at - named],
                bias_ids=encoded[bias_at : bias_at + biases],
                bias_values=floats[bias_at + biases : prompt_at],
                prompt=encoded[prompt_at:output_at],
                output=encoded[output_at:end],
                late=slot & _LATE != 0,
                logprob_ids=encoded[bias_at - named : bias_at],
            )
        )
        begin = end
    return rows
