"""The one shape of every error, OpenAI's, and the HTTP status of each code."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.errors import CodedError

_STATUS: Final = {
    "context_length_exceeded": 400,
    "chat_template_error": 400,
    "no_chat_template": 400,
    "empty_prompt": 400,
    "invalid_prompt": 400,
    "invalid_token": 400,
    "invalid_request": 400,
    "deadline_exceeded": 408,
    "queue_full": 429,
    "engine_unavailable": 503,
    "engine_stalled": 503,
    "client_dropped": 503,
    "wire_version": 503,
    "draining": 503,
    "shutting_down": 503,
}
"""What the packages below say of a request; any other code is the server's fault."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(CodedError):
    """An answer that is an error. `code` is stable; `param` names a field of the body in OpenAI's spelling."""

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
    def of_code(cls, code: str, message: str, param: str | None = None) -> ApiError:
        """The error that a code of the packages below stands for."""
        return cls(_STATUS.get(code, 500), code, message, param)

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""
