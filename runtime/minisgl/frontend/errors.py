"""Errors of the API: OpenAI's error object, and the HTTP status of each code."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.errors import CodedError

_STATUS: Final = {
    "context_length_exceeded": 400,
    "chat_template_error": 400,
    "tools_unavailable": 400,
    "unsupported_parameter": 400,
    "no_chat_template": 400,
    "empty_prompt": 400,
    "invalid_prompt": 400,
    "invalid_token": 400,
    "invalid_request": 400,
    "invalid_value": 400,
    "wrong_task": 400,
    "invalid_grammar": 400,
    "unsupported_schema": 400,
    "grammar_too_complex": 400,
    "grammar_unavailable": 400,
    "no_allowed_token": 400,
    "deadline_exceeded": 408,
    "queue_full": 429,
    "engine_unavailable": 503,
    "not_serving": 503,
    "unsupported_by_engine": 503,
    "model_changed": 503,
    "engine_stalled": 503,
    "client_dropped": 503,
    "wire_version": 503,
    "draining": 503,
    "shutting_down": 503,
}
"""Status of each code that tokenizer workers and schedulers report; any other code is a fault of the server, 500."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

ENGINE_UNAVAILABLE: Final = "engine_unavailable"


class ApiError(CodedError):
    """An error response. `code` is stable; `param` names a field of the body in OpenAI's spelling."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(code, message)
        self.status = status
        self.param = param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", "1")

    @classmethod
    def from_code(cls, code: str, message: str, param: str | None = None) -> ApiError:
        """Make the error for a code of a tokenizer worker or scheduler, with the code's status."""
        return cls(_STATUS.get(code, 500), code, message, param)

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body_fields(self) -> dict[str, Any]:
        error: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body(self) -> bytes:
        return msgspec.json.encode(self.body_fields())


class NotTaken(ApiError):
    """No engine can take the request now, and none has it: it can be held."""

    def __init__(self, message: str) -> None:
        super().__init__(_STATUS[ENGINE_UNAVAILABLE], ENGINE_UNAVAILABLE, message)


class ClientDisconnected(Exception):
    """The client closed its connection; no response can be sent."""
