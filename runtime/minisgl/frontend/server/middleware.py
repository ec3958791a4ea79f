"""Around the framework: every request gets its id and its record, limits that do not depend on what it asks for, and an
end, whatever happens inside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.auth import KeyFile, KeyGate
from minisgl.frontend.server.connection import DROP, READ_OUT
from minisgl.frontend.server.traffic import Traffic, current, new_record

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 64 << 10
"""Of a body. A client has `send_seconds` for each, so that a large body does not ask more of it than a stream does."""

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/metrics", "/version"})
"""For probes, Prometheus and people who look what is there: no key is asked for."""


def observed(app: ASGIApp, traffic: Traffic, config: FrontendConfig) -> ASGIApp:
    """`app` behind everything that is the same for all paths. Raises KeyFileError."""
    app = Entrance(app, traffic)
    if config.api_keys is not None:
        app = KeyGate(app, KeyFile(Path(config.api_keys)), OPEN_PATHS)
    app = Refusals(app)
    if config.cors_origins:
        app = _CorsGate(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-ignored-params", "retry-after", "retry-after-ms"),
        )
    return Observed(app, traffic)


def note_error(error: ApiError) -> None:
    """The request that the running task serves ends in this error."""
    if (record := current.get()) is not None:
        record.error_code = record.error_code or error.code


class Observed:
    """Answers carry the client's `x-request-id` or a new one; faults of ours end here."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        extensions = scope.get("extensions", {})
        record = new_record(scope["method"], scope["path"], Headers(scope=scope), clock())
        record.drop = extensions.get(DROP, {}).get("drop")
        read_out = extensions.get(READ_OUT, {}).get("read_out")
        body_until = record.began + self._traffic.limits.body_seconds
        body_complete = False

        async def observed_receive() -> Message:
            nonlocal body_complete
            if body_complete:
                message = await receive()
            else:
                message = await _in_time(receive, body_until, self._traffic.limits.body_seconds)
                body_complete = not message.get("more_body", False)
            if message["type"] == "http.disconnect" and not record.answer_complete:
                record.gone_in = record.gone_in or record.phase
            return message

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            elif not message.get("more_body", False):
                body = message.get("body", b"")
                at = 0
                for at in range(_PIECE_BYTES, len(body), _PIECE_BYTES):
                    await timed(send({**message, "body": body[at - _PIECE_BYTES : at], "more_body": True}))
                message["body"] = body[at:]
                record.answer_complete = True
            await timed(send(message))
            if record.answer_complete and read_out is not None:
                await timed(read_out())

        async def timed(sending: Awaitable[None]) -> None:
            record.unsent = 0
            record.sending_since = clock()
            await sending
            record.sending_since = 0.0

        current.set(record)
        self._traffic.begin(record)
        try:
            await self._app(scope, observed_receive, observed_send)
        except Exception:
            # The framework has answered, and where it was not reached, as with /metrics, the server answers with a
            # bare 500; unless the answer had begun: then it breaks off here, and the server drops the connection.
            record.error_code = "internal_error"
            logger.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            self._traffic.end(record, clock())


class _CorsGate(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        message = f"{bytes(response.body).decode()}: the server's --cors-origins name who may ask"
        error = ApiError(400, "cors_refused", message)
        note_error(error)
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(error.body(), error.status, kept, "application/json")


class Refusals:
    """Answers with the errors that are raised before the framework is reached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            note_error(error)
            await answer(error, send)


class Entrance:
    """Counts the requests that ask for work, and turns away those that are too many before their body is read."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._admission = traffic.admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current.get()
        if scope["method"] != "POST" or record is None:
            await self._app(scope, receive, send)
            return
        self._admission.enter(record.key)
        try:
            await self._app(scope, receive, send)
        finally:
            self._admission.leave(record.key)


async def answer(error: ApiError, send: Send) -> None:
    """The whole answer that an error is."""
    body = error.body()
    headers = error.headers | {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _in_time(receive: Receive, until: float, seconds: float) -> Message:
    try:
        async with asyncio.timeout_at(until):
            return await receive()
    except TimeoutError:
        # What may still come of the body is not read, so the connection cannot be used again.
        raise ApiError(
            408, "body_timeout", f"the body did not arrive within {seconds:g} s", headers={"connection": "close"}
        ) from None
