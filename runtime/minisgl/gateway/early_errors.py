"""Errors of streams whose headers were sent while they waited: they come as events, in the form of their API. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.frontend.anthropic.responses import error_event as anthropic_error
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import error_event as openai_error
from minisgl.frontend.responses.responses import early_error as responses_error

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
    return ApiError(status, found.code or "bad_response", found.message or f"status {status}", found.param)
