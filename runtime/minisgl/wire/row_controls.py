"""What some rows ask beyond temperature, top-k, top-p and min-p, as it travels in `StepPlan.controls`.

Such rows are rare: a plan without them carries nothing of this, and an engine does nothing for it. A row's controls
come in the plan in which it joins, with its whole history, so a row that was preempted goes on as if it had not been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import IntArray, PlanError

_HEADER: Final = 13


@dataclass(frozen=True, slots=True)
class RowControls:
    slot: int
    prompt_length: int
    repetition: float
    frequency: float
    presence: float
    min_tokens: int
    """While fewer tokens are generated, none of `masked_ids` is chosen."""
    logprobs: int
    """Log-probabilities of the so many likeliest tokens beside the chosen one's; −1: none at all."""
    prompt_logprobs: int
    """The same for prompt tokens from index `prompt_logprobs_from` on."""
    prompt_logprobs_from: int
    masked_ids: IntArray
    bias_ids: IntArray
    """No id twice."""
    bias_values: NDArray[np.float32]
    prompt: IntArray
    """Empty where neither penalties nor log-probabilities of the prompt need it."""
    output: IntArray
    """Tokens generated before the row joined; empty where no penalty needs them."""

    @property
    def penalised(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    def encode(self) -> IntArray:
        floats = np.array((self.repetition, self.frequency, self.presence), np.float32).view(np.int32)
        lists = (self.masked_ids, self.bias_ids, self.prompt, self.output)
        header = (
            self.slot,
            self.prompt_length,
            *floats.tolist(),
            self.min_tokens,
            self.logprobs,
            self.prompt_logprobs,
            self.prompt_logprobs_from,
            *map(len, lists),
        )
        parts = (header, self.masked_ids, self.bias_ids, self.bias_values.view(np.int32), self.prompt, self.output)
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def decode_controls(controls: IntArray) -> list[RowControls]:
    """The rows of `StepPlan.controls`. Raises PlanError when the sizes do not add up."""
    rows = []
    while len(controls):
        if len(controls) < _HEADER:
            raise PlanError("a plan's controls are cut off")
        header = controls[:_HEADER]
        masked, bias, prompt, output = header[9:].tolist()
        sizes = (masked, bias, bias, prompt, output)
        if min(sizes) < 0 or _HEADER + sum(sizes) > len(controls):
            raise PlanError("the sizes in a plan's controls do not add up to their length")
        parts = np.split(controls[_HEADER:], np.cumsum(sizes))
        repetition, frequency, presence = header[2:5].view(np.float32).tolist()
        slot, prompt_length = header[:2].tolist()
        min_tokens, logprobs, prompt_logprobs, prompt_logprobs_from = header[5:9].tolist()
        rows.append(
            RowControls(
                slot=slot,
                prompt_length=prompt_length,
                repetition=repetition,
                frequency=frequency,
                presence=presence,
                min_tokens=min_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                prompt_logprobs_from=prompt_logprobs_from,
                masked_ids=parts[0],
                bias_ids=parts[1],
                bias_values=parts[2].view(np.float32),
                prompt=parts[3],
                output=parts[4],
            )
        )
        controls = parts[5]
    return rows
