"""Results and errors of a call to `LLM`."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.errors import CodedError


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    completion_tokens: int


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token in the raw distribution, before temperature, penalties and biases."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """Log-probabilities by token id: as many of the most likely tokens as requested, best first, or those of
    `logprob_token_ids`."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt."""

    text: str
    token_ids: list[int]
    """Sampled tokens, including the one that ended the answer."""
    finish_reason: Literal["stop", "length", "error"]
    usage: Usage
    error: str = ""
    """Reason for an incomplete answer, when `finish_reason` is `error`."""
    logprobs: list[Logprob] | None = None
    """One entry for each of `token_ids`; None: not requested."""
    prompt_logprobs: list[Logprob] | None = None
    """One entry for each prompt token after the first; None: not requested."""


class OfflineError(CodedError):
    """A prompt or parameter that cannot be served. `code` is stable; the message contains the index of the prompt."""
