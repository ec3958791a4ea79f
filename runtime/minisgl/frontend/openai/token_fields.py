"""Fields with token ids and log-probabilities of prompts, which vLLM and SGLang have beside those of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.frontend.generation.response_format import finite
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ScoredToken


def stop_fields(end: Finished | None) -> dict[str, Any]:
    """Return what ended an answer, by vLLM's name and by SGLang's: a string, an expression or a token id; null for the
    model's own end and for limits."""
    matched = None if end is None else end.matched_stop
    return {"stop_reason": matched, "matched_stop": matched}


def prompt_logprobs(choice: Delta, tops: int) -> list[dict[str, Any] | None]:
    """Return, for each token of a whole choice's prompt, its log-probability and those of the `tops` most likely ones
    by token id; None for the first token."""
    assert choice.finished is not None
    # An echo with log-probabilities has those of the prompt, too.
    return [_by_id(token, tops) for token in choice.prompt_scored or choice.scored[: choice.finished.prompt_tokens]]


def token_name(name: str, token_id: int, as_ids: bool) -> str:
    """Return the name of a token in `logprobs`: `name`, or with `return_tokens_as_token_ids` its id."""
    return f"token_id:{token_id}" if as_ids else name


def cut_tops(tokens: Sequence[ScoredToken], tops: int | None) -> Sequence[ScoredToken]:
    """Return the tokens with at most `tops` of the most likely tokens each; None: as they are."""
    if tops is None:
        return tokens
    return [msgspec.structs.replace(token, top=token.top[:tops], top_ids=token.top_ids[:tops]) for token in tokens]


def before_named(token: ScoredToken) -> ScoredToken:
    """Return a token with itself before the tokens that the request names, unless it is one of them."""
    if token.logprob is None or token.token_id in token.top_ids:
        return token
    top = [(token.name, token.logprob), *token.top]
    return msgspec.structs.replace(token, top=top, top_ids=[token.token_id, *token.top_ids])


def _by_id(token: ScoredToken, tops: int) -> dict[str, Any] | None:
    if token.logprob is None:
        return None
    ids, top = token.top_ids[:tops], token.top[:tops]
    ranks = {token_id: rank for rank, token_id in enumerate(token.top_ids, 1)}
    entries = {token_id: (logprob, name) for token_id, (name, logprob) in zip(ids, top, strict=True)}
    entries.setdefault(token.token_id, (token.logprob, token.name))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": name.decode("utf-8", "replace"),
        }
        for token_id, (logprob, name) in entries.items()
    }
