"""Logits processors and log-probability requests of a request, encoded for the plan in which its row joins."""

from __future__ import annotations

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.scheduler.request import Request
from minisgl.wire.logits_processors import RowLogitsProcessors
from minisgl.wire.messages import SamplingParams
from minisgl.wire.plan import EMPTY, IntArray


def encode_logits_processors(request: Request, config: SchedulerConfig) -> IntArray:
    """The part of `StepPlan.logits_processors` for the row that `request` has just been given.

    Empty when the row samples from the model's logits as they are and reports no log-probabilities: most rows do.
    """
    params, slot, constrained = request.params, request.slot, request.is_constrained
    assert slot is not None
    penalized = is_penalized(params)
    # The masks of a constrained row have its minimum length as well.
    masked = _masked_ids(request, config) if params.min_tokens and not constrained else []
    reports = params.logprobs is not None or params.prompt_logprobs is not None
    if not (penalized or masked or params.logit_bias or reports or constrained):
        return EMPTY
    needs_prompt = penalized or request.prompt_logprobs_from < request.prompt_length
    return RowLogitsProcessors(
        slot=slot,
        prompt_length=request.prompt_length,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        min_tokens=params.min_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        prompt_logprobs_from=request.prompt_logprobs_from,
        masked_ids=np.array(masked, np.int32),
        bias_ids=np.array(list(params.logit_bias), np.int32),
        bias_values=np.array(list(params.logit_bias.values()), np.float32),
        prompt=request.tokens[: request.prompt_length] if needs_prompt else EMPTY,
        output=request.tokens[request.prompt_length :] if penalized else EMPTY,
        late=constrained,
        logprob_ids=np.array(params.logprob_token_ids, np.int32),
    ).encode()


def is_penalized(params: SamplingParams) -> bool:
    """Whether tokens that occurred before are less likely."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _masked_ids(request: Request, config: SchedulerConfig) -> list[int]:
    """Tokens that would end the answer."""
    ends = set(request.stop_token_ids)
    if not request.params.ignore_eos:
        ends.update(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
    return sorted(ends)
