"""`logprobs` of a choice, in the two forms that OpenAI has for chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.frontend.generation.logprob_values import finite
from minisgl.wire.text import ScoredToken


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """`bytes` of all tokens, joined, are the content in UTF-8."""
    content = [
        {
            "token": token.name.decode("utf-8", "replace"),
            "logprob": finite(token.logprob),
            "bytes": list(token.text),
            "top_logprobs": [
                {"token": name.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(name)}
                for name, logprob in token.top
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": [token_text(token.name) for token in tokens],
        "top_logprobs": [_top_logprobs(token) for token in tokens],
    }


def token_text(name: bytes) -> str:
    """Return a token as text; one that is a part of a character is written byte by byte."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _top_logprobs(token: ScoredToken) -> dict[str, float | None] | None:
    """Return the most likely tokens, and the token itself if it is not among them."""
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for name, logprob in (*token.top, (token.name, token.logprob)):
        # Best first: of two tokens with the same text the more likely one stays.
        top.setdefault(token_text(name), finite(logprob))
    return top
