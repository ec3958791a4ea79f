"""What a request asks beyond temperature, top-k, top-p and min-p; most requests ask nothing of it."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit
from minisgl.wire.plan import NO_CONTROLS, IntArray
from minisgl.wire.row_controls import RowControls

MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 128
LARGEST_PENALTY: Final = 1e4
"""Far above what anybody means, and with the longest answer still far below the end of float32."""
REPETITION_RANGE: Final = (1e-3, 1e3)


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    repetition: float
    frequency: float
    presence: float
    min_tokens: int
    masked_ids: IntArray
    """What may not be chosen before `min_tokens` tokens: what would end the answer."""
    logprobs: int
    prompt_logprobs: int
    bias_ids: IntArray
    bias_values: NDArray[np.float32]

    def row(self, slot: int, tokens: IntArray, prompt_length: int, prompt_reported: int) -> IntArray:
        """The row of `StepPlan.controls` with which `tokens`, prompt and output so far, join in `slot`."""
        penalised = self.repetition != 1 or self.frequency != 0 or self.presence != 0
        needs_prompt = penalised or (self.prompt_logprobs >= 0 and prompt_reported < prompt_length)
        row = RowControls(
            slot=slot,
            prompt_length=prompt_length,
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_logprobs_from=prompt_reported,
            masked_ids=self.masked_ids,
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
            prompt=tokens[:prompt_length] if needs_prompt else NO_CONTROLS,
            output=tokens[prompt_length:] if penalised else NO_CONTROLS,
        )
        return row.encode()


def parse_controls(message: Submit, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Controls | None:
    """None: the request asks for none. Raises RequestError."""
    _check_penalties(message)
    _check_biases(message.logit_bias, vocab_size)
    if not 0 <= message.min_tokens <= message.max_tokens:
        raise RequestError("invalid_request", "min_tokens is negative or above max_tokens")
    for name, count in (("logprobs", message.logprobs), ("prompt_logprobs", message.prompt_logprobs)):
        if not -1 <= count <= MAX_LOGPROBS:
            raise RequestError("invalid_request", f"{name} is {count}, which is not in -1..{MAX_LOGPROBS}")
    ends = {*message.stop_token_ids, *(() if message.ignore_eos else eos_token_ids)}
    masked = sorted(token for token in ends if 0 <= token < vocab_size) if message.min_tokens else []
    penalised = message.repetition_penalty != 1 or message.frequency_penalty or message.presence_penalty
    if not (penalised or masked or message.logit_bias or message.logprobs >= 0 or message.prompt_logprobs >= 0):
        return None
    return Controls(
        repetition=message.repetition_penalty,
        frequency=message.frequency_penalty,
        presence=message.presence_penalty,
        min_tokens=message.min_tokens,
        masked_ids=np.array(masked, np.int32),
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
        bias_ids=np.array(list(message.logit_bias), np.int32),
        bias_values=np.array(list(message.logit_bias.values()), np.float32),
    )


def _check_penalties(message: Submit) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(message, name)
        # Not `abs(value) > …`: that would let NaN pass.
        if not abs(value) <= LARGEST_PENALTY:
            raise RequestError("invalid_request", f"{name} is {value}, which is not within ±{LARGEST_PENALTY:g}")
    lowest, highest = REPETITION_RANGE
    if not lowest <= message.repetition_penalty <= highest:
        value = message.repetition_penalty
        raise RequestError("invalid_request", f"repetition_penalty is {value}, which is not in {lowest:g}..{highest:g}")


def _check_biases(biases: dict[int, float], vocab_size: int) -> None:
    if len(biases) > MAX_BIASES:
        raise RequestError("invalid_request", f"logit_bias names {len(biases)} tokens; {MAX_BIASES} are the most")
    for token, value in biases.items():
        if not 0 <= token < vocab_size:
            raise RequestError(
                "invalid_token", f"logit_bias names token id {token}, outside of the vocabulary, 0..{vocab_size - 1}"
            )
        if not (math.isfinite(value) and abs(value) <= LARGEST_PENALTY):
            raise RequestError(
                "invalid_request", f"logit_bias of token {token} is {value}, not within ±{LARGEST_PENALTY:g}"
            )
