"""Validation of requests from clients. The frontend has checked most values already, with better messages; these
checks keep the engine safe from any client."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from msgspec.structs import replace

from minisgl.config import SchedulerConfig
from minisgl.scheduler.request import Request
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import (
    MAX_PREDICTION_TOKENS,
    REQUEST_ID_BYTES,
    AnswerConstraint,
    Pool,
    SamplingParams,
    Submit,
)
from minisgl.wire.plan import IntArray

LOWEST_TEMPERATURE: Final = 1e-5
"""Below it logits / temperature leaves the range of float32; sampling has long become greedy."""
HIGHEST_TEMPERATURE: Final = 1e5
"""Far above it float32 has no value; sampling has long become uniform."""
MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 128
MAX_PENALTY: Final = 1e4
"""Far above useful values, and with the longest answer still far below the maximum of float32."""
REPETITION_RANGE: Final = (1e-3, 1e3)
MAX_SALT_BYTES: Final = 1024
MAX_TENANT_BYTES: Final = 64
MAX_GRAMMAR_CHARACTERS: Final = 4 << 20
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_TOKENS: Final = 1024


def request_from(message: Submit | Pool, *, client: int, arrival: int, now: float, config: SchedulerConfig) -> Request:
    """The request of a client's message. Raises RequestError when a value is wrong, or the model has another task."""
    task = "generate" if config.pooling is None else config.pooling.task
    if isinstance(message, Submit) != (task == "generate"):
        raise RequestError("wrong_task", f"the model is served for the task {task}")
    if len(message.id) != REQUEST_ID_BYTES:
        raise _invalid(f"the request id has {len(message.id)} bytes; it must have {REQUEST_ID_BYTES}")
    if len(message.prompt) % 4 or len(message.output) % 4 or not message.prompt:
        raise _invalid("the prompt must consist of int32 token ids, at least one")
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise _invalid(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
    if len(message.tenant) > MAX_TENANT_BYTES:
        raise _invalid(f"tenant has more than {MAX_TENANT_BYTES} bytes")
    tokens = np.frombuffer(message.prompt + message.output, "<i4").astype(np.int32)
    _check_vocabulary("the prompt", (int(tokens.min()), int(tokens.max())), config)
    if isinstance(message, Pool):
        return _pooled(message, tokens, client, arrival, now, config)
    return _generated(message, tokens, client, arrival, now, config)


def _generated(
    message: Submit, tokens: IntArray, client: int, arrival: int, now: float, config: SchedulerConfig
) -> Request:
    prompt_length = len(message.prompt) // 4
    if prompt_length >= config.max_model_len:
        raise _too_long(f"the prompt has {prompt_length}", config)
    params = message.params
    if params.max_tokens is None or params.seed is None:
        raise _invalid("max_tokens and seed must be set")
    limit = prompt_length + params.max_tokens
    if limit <= len(tokens):
        raise _invalid("max_tokens leaves no token to generate")
    if limit > config.max_model_len:
        raise _too_long(f"the prompt has {prompt_length} and max_tokens is {params.max_tokens}", config)
    _check_params(params, params.max_tokens, params.seed, config)
    _check_constraint(message.constraint, params.allowed_token_ids, config)
    # A request that resumes behind an earlier output has already received the log-probabilities of its prompt.
    reports_prompt = params.prompt_logprobs is not None and not message.output
    return Request(
        id=message.id,
        client=client,
        tokens=tokens,
        prompt_length=prompt_length,
        limit=limit,
        params=replace(
            params,
            temperature=params.temperature if params.temperature >= LOWEST_TEMPERATURE else 0.0,
            top_k=params.top_k if 0 < params.top_k < config.vocab_size else 0,
            logprobs=len(params.logprob_token_ids) or params.logprobs,
        ),
        stop_token_ids=frozenset(token for token in params.stop_token_ids if 0 <= token < config.vocab_size),
        priority=message.priority,
        deadline=_deadline(message, now),
        arrival=arrival,
        queued_at=now,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        stream=message.stream,
        continues=bool(message.output),
        prompt_logprobs_from=1 if reports_prompt else prompt_length,
        prediction=_prediction(message.prediction, config),
    )


_NO_SAMPLING: Final = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)


def _pooled(message: Pool, tokens: IntArray, client: int, arrival: int, now: float, config: SchedulerConfig) -> Request:
    """A request whose answer is the output at the end of its prompt."""
    if len(tokens) > config.max_model_len:
        raise _too_long(f"the text has {len(tokens)}", config)
    if not 0 <= message.second_text < len(tokens):
        raise _invalid(f"the second text begins at token {message.second_text} of {len(tokens)}")
    return Request(
        id=message.id,
        client=client,
        tokens=tokens,
        prompt_length=len(tokens),
        limit=len(tokens) + 1,
        params=_NO_SAMPLING,
        stop_token_ids=frozenset(),
        priority=message.priority,
        deadline=_deadline(message, now),
        arrival=arrival,
        queued_at=now,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        stream=False,
        prompt_logprobs_from=len(tokens),
        second_text=message.second_text,
    )


def _deadline(message: Submit | Pool, now: float) -> float | None:
    return now + message.remaining_ms / 1000 if message.remaining_ms else None


def _check_params(params: SamplingParams, max_tokens: int, seed: int, config: SchedulerConfig) -> None:
    if not (0 <= params.temperature <= HIGHEST_TEMPERATURE and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1):
        raise _invalid("temperature, top_p or min_p is out of range")
    if not -(2**63) <= seed < 2**63:
        raise _invalid("seed is not a 64-bit integer")
    if len(params.logit_bias) > MAX_BIASES:
        raise _invalid(f"logit_bias has {len(params.logit_bias)} tokens; the limit is {MAX_BIASES}")
    penalties = (-MAX_PENALTY, MAX_PENALTY)
    in_range = [
        ("presence_penalty", params.presence_penalty, penalties),
        ("frequency_penalty", params.frequency_penalty, penalties),
        ("repetition_penalty", params.repetition_penalty, REPETITION_RANGE),
        ("logprobs", params.logprobs or 0, (0, MAX_LOGPROBS)),
        ("prompt_logprobs", params.prompt_logprobs or 0, (0, MAX_LOGPROBS)),
        *((f"logit_bias of token {token}", value, penalties) for token, value in params.logit_bias.items()),
    ]
    for name, value, (lowest, highest) in in_range:
        # NaN is in no range.
        if not lowest <= value <= highest:
            raise _invalid(f"{name} is {value}; it must be in {lowest:g}..{highest:g}")
    if params.logit_bias:
        _check_vocabulary("logit_bias", params.logit_bias, config)
    if params.logprob_token_ids:
        if params.logprobs is None or len(params.logprob_token_ids) > MAX_LOGPROBS:
            raise _invalid(f"logprob_token_ids requires logprobs, and at most {MAX_LOGPROBS} token ids")
        _check_vocabulary("logprob_token_ids", params.logprob_token_ids, config)
    if not 0 <= params.min_tokens <= max_tokens:
        raise _invalid("min_tokens is negative or above max_tokens")


def _prediction(tokens: bytes, config: SchedulerConfig) -> IntArray:
    if len(tokens) % 4:
        raise _invalid("the prediction must consist of int32 token ids")
    prediction = np.frombuffer(tokens, "<i4")[:MAX_PREDICTION_TOKENS].astype(np.int32)
    if len(prediction):
        _check_vocabulary("the prediction", (int(prediction.min()), int(prediction.max())), config)
    return prediction


def _check_constraint(constraint: AnswerConstraint, allowed: Collection[int], config: SchedulerConfig) -> None:
    if len(constraint.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _invalid(f"the grammar has more than {MAX_GRAMMAR_CHARACTERS} characters")
    if allowed:
        _check_vocabulary("allowed_token_ids", allowed, config)
    if len(constraint.bad_words) > MAX_BAD_WORDS:
        raise _invalid(f"bad_words has {len(constraint.bad_words)} entries; the limit is {MAX_BAD_WORDS}")
    for word in constraint.bad_words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise _invalid(f"an entry of bad_words has {len(word)} tokens; it must have 1..{MAX_BAD_WORD_TOKENS}")
        _check_vocabulary("bad_words", word, config)
    if (thinking := constraint.thinking) is not None:
        if not thinking.start or not thinking.end or thinking.budget < -1:
            raise _invalid("thinking needs both markers, and a budget of at least 0 or none")
        _check_vocabulary("thinking", (*thinking.start, *thinking.end), config)


def _check_vocabulary(name: str, tokens: Collection[int], config: SchedulerConfig) -> None:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < config.vocab_size:
            raise RequestError(
                "invalid_token",
                f"{name} contains token id {token}; the vocabulary of the model is 0..{config.vocab_size - 1}",
            )


def _too_long(lengths: str, config: SchedulerConfig) -> RequestError:
    return RequestError(
        "context_length_exceeded",
        f"This model's maximum context length is {config.max_model_len} tokens, but {lengths}",
    )


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_request", message)
