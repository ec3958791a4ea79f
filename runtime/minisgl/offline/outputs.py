"""What a call to `LLM` returns, and raises."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.errors import CodedError


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    completion_tokens: int


class Logprob(msgspec.Struct, frozen=True):
    """Of one token, given those before it: in the raw distribution, before temperature, penalties and biases."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The likeliest tokens by id, best first; as many as were asked for."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt."""

    text: str
    token_ids: list[int]
    """Sampled tokens, with the one that ended the answer."""
    finish_reason: Literal["stop", "length", "error"]
    usage: Usage
    error: str = ""
    """Why the answer is not complete, when `finish_reason` is `error`."""
    logprobs: list[Logprob] | None = None
    """Of each of `token_ids`; None: not asked for."""
    prompt_logprobs: list[Logprob] | None = None
    """Of the prompt's tokens but the first, which has none; None: not asked for."""


class OfflineError(CodedError):
    """A prompt or parameter that cannot be served. `code` is stable; the message names the prompt by its index."""
