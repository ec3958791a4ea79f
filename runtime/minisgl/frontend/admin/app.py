"""The administration: its own port, its own keys. Abort requests, flush the prefix cache, look at what goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.auth import KeyFile, KeyGate
from minisgl.frontend.server.body import read_json_body
from minisgl.frontend.server.middleware import Refusals
from minisgl.frontend.server.traffic import RequestRecord
from minisgl.frontend.tokenizers import Tokenizers

_MAX_BODY_BYTES: Final = 64 << 10
_FLUSH_SECONDS: Final = 10.0


class _Abort(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str | None = None
    """The `x-request-id` or the id of the answer."""
    all: bool = False


def create_admin(tokenizers: Tokenizers, keys: Path) -> ASGIApp:
    """Raises KeyFileError."""
    traffic = tokenizers.traffic

    async def abort(request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, _MAX_BODY_BYTES)
        try:
            asked = msgspec.json.decode(body, type=_Abort)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, "invalid_request", f"the body is not understood: {error}") from error
        if asked.all == (asked.request_id is not None):
            raise ApiError(400, "invalid_request", 'give either {"request_id": "…"} or {"all": true}', "request_id")
        found = [
            record
            for record in traffic.in_flight
            if record.exchange is not None and (asked.all or _is_called(record, asked.request_id))
        ]
        if asked.request_id is not None and not found:
            raise ApiError(404, "request_not_found", "no request with this id is under way", "request_id")
        for record in found:
            # Not to be tried again: somebody did not want it.
            headers = {"x-should-retry": "false"}
            record.fail(ApiError(503, "aborted", "an administrator ended the request", headers=headers))
        return _json({"aborted": [record.request_id for record in found]})

    async def flush_cache(_: Request) -> Response:
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                pages = await tokenizers.flush_cache()
        except TimeoutError:
            raise ApiError(
                503, "engine_unavailable", f"the engine did not answer within {_FLUSH_SECONDS:g} s"
            ) from None
        return _json({"freed_pages": pages})

    async def state(_: Request) -> Response:
        now = asyncio.get_running_loop().time()
        return _json(
            {
                "model": None if traffic.model is None else traffic.model.card.name,
                "not_ready": tokenizers.not_ready(),
                "scheduler": None if traffic.status is None else msgspec.to_builtins(traffic.status),
                "step_age_seconds": round(traffic.step_age(now), 3),
                "waiting": traffic.admission.waiting,
                "waiting_prompt_tokens": traffic.admission.waiting_tokens,
                "requests": [
                    {
                        "request_id": record.request_id,
                        "id": record.answer_id,
                        "path": record.path,
                        "key": record.key,
                        "phase": record.phase,
                        "seconds": round(now - record.began, 1),
                    }
                    for record in sorted(traffic.in_flight, key=lambda record: record.began)
                ],
            }
        )

    app = Starlette(
        routes=[
            Route("/abort", abort, methods=["POST"]),
            Route("/flush_cache", flush_cache, methods=["POST"]),
            Route("/state", state, methods=["GET"]),
        ],
        exception_handlers={ApiError: _on_error, HTTPException: _on_error},
    )
    return Refusals(KeyGate(app, KeyFile(keys)))


def _is_called(record: RequestRecord, request_id: str | None) -> bool:
    # An answer's id has a prefix that says what it is: `chatcmpl-`.
    return request_id is not None and (
        request_id == record.request_id
        or (record.answer_id != "" and request_id.rpartition("-")[2] == record.answer_id)
    )


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = "only POST /abort, POST /flush_cache and GET /state are answered here"
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        error = ApiError(error.status_code, code, message, headers=dict(error.headers or {}))
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, "application/json")


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.format(msgspec.json.encode(value)) + b"\n", media_type="application/json")
