"""The admin API, with its own port and keys: abort requests, flush the prefix cache, show the requests in progress."""

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

from minisgl.frontend.config import Access
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.auth import ApiKeyMiddleware, KeyFile
from minisgl.frontend.server.json_body import read_json_body
from minisgl.frontend.server.middleware import ErrorMiddleware
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.responses import on_error
from minisgl.frontend.server.web_origins import without_foreign_pages
from minisgl.frontend.tokenizers import TokenizerPool

_MAX_BODY_BYTES: Final = 64 << 10
_FLUSH_SECONDS: Final = 10.0


class _Abort(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str | None = None
    """The `x-request-id`, or the id in the response."""
    all: bool = False


def create_admin(tokenizers: TokenizerPool, keys: Path, access: Access, *, on_loopback: bool) -> ASGIApp:
    """`on_loopback`: only this machine can connect. Raises KeyFileError and OriginListError."""
    requests = tokenizers.requests

    async def abort(request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, _MAX_BODY_BYTES)
        try:
            target = msgspec.json.decode(body, type=_Abort)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, "invalid_request", f"invalid body: {error}") from error
        if target.all == (target.request_id is not None):
            message = 'send either {"request_id": "…"} or {"all": true}'
            raise ApiError(400, "invalid_request", message, "request_id")
        aborted = []
        for record in requests.in_flight:
            if record.stream is not None and (target.all or _has_id(record, target.request_id)):
                aborted.append(record.request_id)
                # Clients should not retry: the abort was deliberate.
                headers = {"x-should-retry": "false"}
                record.stream.fail(
                    ApiError(503, "aborted", "the request was aborted by an administrator", headers=headers)
                )
        if target.request_id is not None and not aborted:
            raise ApiError(404, "request_not_found", "no running request has this id", "request_id")
        return _indented({"aborted": aborted})

    async def flush_cache(_: Request) -> Response:
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                pages = await tokenizers.flush_cache()
        except TimeoutError:
            message = f"the engine did not answer within {_FLUSH_SECONDS:g} s"
            raise ApiError(503, "engine_unavailable", message) from None
        return _indented({"freed_pages": pages})

    async def state(_: Request) -> Response:
        now = asyncio.get_running_loop().time()
        return _indented(
            {
                "model": None if requests.model is None else requests.model.card.name,
                "not_ready": tokenizers.not_ready_reason(),
                "scheduler": requests.status,
                "step_age_seconds": round(requests.step_age(now), 3),
                "waiting": requests.admission.waiting,
                "waiting_prompt_tokens": requests.admission.waiting_tokens,
                "requests": [
                    {
                        "request_id": record.request_id,
                        "id": record.response_id,
                        "path": record.path,
                        "key": record.key_name,
                        "phase": record.phase,
                        "seconds": round(now - record.started_at, 1),
                    }
                    for record in sorted(requests.in_flight, key=lambda record: record.started_at)
                ],
            }
        )

    app = Starlette(
        routes=[
            Route("/abort", abort, methods=["POST"]),
            Route("/flush_cache", flush_cache, methods=["POST"]),
            Route("/state", state, methods=["GET"]),
        ],
        exception_handlers={ApiError: on_error, HTTPException: on_error},
    )
    with_keys = ApiKeyMiddleware(app, KeyFile(keys))
    return ErrorMiddleware(without_foreign_pages(with_keys, access, on_loopback=on_loopback))


def _has_id(record: RequestRecord, request_id: str | None) -> bool:
    # The id in a response has a prefix for its kind: `chatcmpl-`, `resp_`.
    return request_id is not None and (
        request_id == record.request_id
        or (record.response_id != "" and request_id.replace("_", "-").rpartition("-")[2] == record.response_id)
    )


def _indented(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.format(msgspec.json.encode(value)) + b"\n", media_type="application/json")
