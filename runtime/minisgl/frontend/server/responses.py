"""JSON responses and error responses of all ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.error_body import error_body
from minisgl.frontend.server.request_record import find_record


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Make the response to a request that ends in this error, and note the error in the request's record."""
    request_id = ""
    if (record := find_record(scope)) is not None:
        if not record.error_code:
            record.error_code, record.error_status = error.code, error.status
        request_id = record.request_id
    return Response(error_body(error, scope["path"], request_id), error.status, error.headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of a Starlette application."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 405:
            message = f"method {request.method} not allowed; use {headers.get('Allow', '')}"
            error = ApiError(405, "method_not_allowed", message, headers=headers)
        else:
            error = ApiError(404, "not_found", "path not found", headers=headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal_error", "internal server error; see the server's log")
    return error_response(request.scope, error)
