"""`logprobs` of a choice, in the two forms that OpenAI has for chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from minisgl.wire.text import ScoredToken

LOWEST: Final = -9999.0
"""JSON has no infinity; this is what OpenAI's API gives for what cannot be sampled."""


def chat_scores(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """`bytes` of all tokens together are the content in UTF-8."""
    content = [
        {
            "token": token.name.decode("utf-8", "replace"),
            "logprob": _finite(token.logprob),
            "bytes": list(token.text),
            "top_logprobs": [
                {"token": name.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(name)}
                for name, logprob in token.top
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_scores(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "tokens": [spelled(token.name) for token in tokens],
        "top_logprobs": [_tops(token) for token in tokens],
    }


def spelled(name: bytes) -> str:
    """The token as text, where it is one: a part of a character is spelled byte by byte."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _tops(token: ScoredToken) -> dict[str, float | None] | None:
    """The likeliest tokens, and the token itself where it is not one of them."""
    if token.logprob is None:
        return None
    tops: dict[str, float | None] = {}
    for name, logprob in (*token.top, (token.name, token.logprob)):
        # Best first: of two tokens that are spelled alike the likelier stays.
        tops.setdefault(spelled(name), _finite(logprob))
    return tops


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
