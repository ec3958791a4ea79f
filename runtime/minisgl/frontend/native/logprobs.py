"""Log-probabilities in `meta_info` of /generate: lists of [log-probability, token id, text or null]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.frontend.generation.logprob_values import finite
from minisgl.wire.text import ScoredToken

Entry = tuple[float | None, int, str | None]


def token_logprobs(tokens: Sequence[ScoredToken], texts: bool) -> list[Entry]:
    """Return an entry for each token; `texts`: with its text."""
    return [(finite(token.logprob), token.token_id, _text(token.name) if texts else None) for token in tokens]


def top_logprobs(tokens: Sequence[ScoredToken], texts: bool) -> list[list[Entry] | None]:
    """Return the most likely tokens at the position of each token, best first; None where there are none."""
    return [
        [
            (finite(logprob), token_id, _text(name) if texts else None)
            for (name, logprob), token_id in zip(token.top, token.top_ids, strict=True)
        ]
        or None
        for token in tokens
    ]


def meta_info(
    prompt: Sequence[ScoredToken] | None, answer: Sequence[ScoredToken], tops: str, texts: bool
) -> dict[str, Any]:
    """Return the fields of `meta_info`. `prompt`: None if no log-probabilities of the prompt are wanted. `tops`: part
    of the names of the fields with the other tokens that are reported; empty: there are none."""
    fields: dict[str, Any] = {
        "input_token_logprobs": token_logprobs(prompt or (), texts),
        "output_token_logprobs": token_logprobs(answer, texts),
    }
    if tops:
        fields[f"input_{tops}_logprobs"] = top_logprobs(prompt or (), texts)
        fields[f"output_{tops}_logprobs"] = top_logprobs(answer, texts)
    return fields


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
