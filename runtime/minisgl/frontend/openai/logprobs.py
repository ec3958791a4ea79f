"""`logprobs` of a choice, in the two forms that OpenAI has for chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.frontend.generation.response_format import finite
from minisgl.frontend.openai.token_fields import token_name
from minisgl.wire.text import ScoredToken


def chat_logprobs(tokens: Sequence[ScoredToken], as_ids: bool = False) -> dict[str, Any]:
    """`bytes` of all tokens, joined, are the content in UTF-8. `as_ids`: tokens are named by their ids."""
    content = [
        {
            "token": token_name(token.name.decode("utf-8", "replace"), token.token_id, as_ids),
            "logprob": finite(token.logprob),
            "bytes": list(token.text),
            "top_logprobs": [
                {
                    "token": token_name(name.decode("utf-8", "replace"), token_id, as_ids),
                    "logprob": finite(logprob),
                    "bytes": list(name),
                }
                for (name, logprob), token_id in zip(token.top, token.top_ids, strict=True)
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], as_ids: bool = False) -> dict[str, Any]:
    """`as_ids`: tokens are named by their ids."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": [token_name(token_text(token.name), token.token_id, as_ids) for token in tokens],
        "top_logprobs": [_top_logprobs(token, as_ids) for token in tokens],
    }


def token_text(name: bytes) -> str:
    """Return a token as text; one that is a part of a character is written byte by byte."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _top_logprobs(token: ScoredToken, as_ids: bool) -> dict[str, float | None] | None:
    """Return the most likely tokens, and the token itself if it is not among them."""
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    all_tops, ids = (*token.top, (token.name, token.logprob)), (*token.top_ids, token.token_id)
    for (name, logprob), token_id in zip(all_tops, ids, strict=True):
        # Best first: of two tokens with the same text the more likely one stays.
        top.setdefault(token_name(token_text(name), token_id, as_ids), finite(logprob))
    return top
