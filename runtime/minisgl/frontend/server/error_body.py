"""Bodies of errors in the form of the API that a path belongs to."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from minisgl.frontend.errors import ApiError

ANTHROPIC_PATH: Final = "/v1/messages"
"""Paths that begin with it belong to Anthropic's API, all others to OpenAI's."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_TOO_LONG: Final = re.compile(r"maximum context length is (\d+) tokens. The prompt has (?:at least )?(\d+) tokens")


_RERANK_PATHS: Final = frozenset({"/rerank", "/v1/rerank", "/v2/rerank"})
"""Cohere's, Jina's, vLLM's and TEI's clients send requests there."""
TEI_PATHS: Final = frozenset({"/embed", "/predict"})
_TEI_TYPES: Final = {408: "Overloaded", 413: "Validation", 429: "Overloaded", 503: "Unhealthy"}


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_error(error, request_id)
    if path in _RERANK_PATHS:
        # Cohere's clients look for `message`, Jina's for `detail`.
        return msgspec.json.encode({**error.body_fields(), "message": error.message, "detail": error.message})
    if path in TEI_PATHS:
        kind = _TEI_TYPES.get(error.status, "Backend" if error.status >= 500 else "Validation")
        return msgspec.json.encode(
            {"error": error.message, "error_type": kind, "code": error.code, "param": error.param}
        )
    return error.body()


def anthropic_error(error: ApiError, request_id: str | None = None) -> bytes:
    """Return an error in Anthropic's form, with our own code and field beside its own ones."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields = {"type": kind, "message": _message(error), "code": error.code, "param": error.param}
    body: dict[str, Any] = {"type": "error", "error": fields}
    return msgspec.json.encode(body if request_id is None else {**body, "request_id": request_id})


def _message(error: ApiError) -> str:
    """Return the message, with the beginning by which Claude Code finds that it has to shorten a conversation."""
    if error.code == "context_length_exceeded" and (sizes := _TOO_LONG.search(error.message)) is not None:
        return f"prompt is too long: {sizes[2]} tokens > {sizes[1]} maximum. {error.message}"
    return error.message
