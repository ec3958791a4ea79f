"""Errors of streams whose headers were sent while they waited: they come as events, in the form of their API. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.frontend.anthropic.responses import error_event as anthropic_error
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import error_event as openai_error
from minisgl.frontend.responses.responses import early_error as responses_error

BAD_RESPONSE: Final = "bad_response"
_CODES: Final = frozenset(
    {
        "aborted",
        "ambiguous_model",
        "bad_response",
        "body_timeout",
        "body_too_large",
        "chat_template_error",
        "client_dropped",
        "compaction_not_supported",
        "context_length_exceeded",
        "cors_refused",
        "deadline_exceeded",
        "draining",
        "duplicate_request",
        "empty_prompt",
        "engine_error",
        "engine_stalled",
        "engine_unavailable",
        "expired_token",
        "frontend_lost",
        "grammar_failed",
        "grammar_too_complex",
        "grammar_unavailable",
        "head_timeout",
        "headers_too_large",
        "host_not_allowed",
        "internal_error",
        "invalid_access_token",
        "invalid_api_key",
        "invalid_grammar",
        "invalid_http",
        "invalid_json",
        "invalid_message",
        "invalid_prompt",
        "invalid_request",
        "invalid_token",
        "invalid_value",
        "loop_detected",
        "method_not_allowed",
        "missing_api_key",
        "missing_required_parameter",
        "model_changed",
        "model_not_found",
        "no_allowed_token",
        "no_chat_template",
        "not_found",
        "not_ready",
        "not_serving",
        "origin_not_allowed",
        "provider_unavailable",
        "queue_full",
        "queue_timeout",
        "rate_limit_exceeded",
        "request_not_found",
        "response_not_found",
        "shutting_down",
        "tokens_lost",
        "too_many_requests",
        "tools_unavailable",
        "unknown_parameter",
        "unknown_tenant",
        "unsupported_by_engine",
        "unsupported_media_type",
        "unsupported_parameter",
        "unsupported_schema",
        "unsupported_transfer_encoding",
        "wire_version",
        "wrong_task",
    }
)
"""Those of the documentation."""

_RENDER: Final = {"/v1/messages": anthropic_error, "/v1/responses": responses_error}


class _Fields(msgspec.Struct):
    message: str = ""
    code: str | None = None
    param: str | None = None


class _Error(msgspec.Struct):
    error: _Fields


def early_error(path: str, error: ApiError) -> bytes:
    """Return the only event of a stream of this path that ends before its answer has begun."""
    return _RENDER.get(path, openai_error)(error)


def error_in(status: int, body: bytes) -> ApiError:
    """Return the error that the body of a frontend's response has."""
    try:
        found = msgspec.json.decode(body, type=_Error).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = _Fields()
    return ApiError(status, found.code or BAD_RESPONSE, found.message or f"status {status}", found.param)


def counted_code(code: str) -> str:
    """Return the code under which an error is counted. A series is kept for each, so those that a server invents are
    counted together."""
    return code if code in _CODES else BAD_RESPONSE
