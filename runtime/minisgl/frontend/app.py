"""The ASGI application: routes, error bodies, request ids. No state of its own."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation import GenerationEndpoint
from minisgl.frontend.requests import parse_chat, parse_completion
from minisgl.frontend.tokenizers import UNAVAILABLE, Tokenizers
from minisgl.wire.text import ServedModel

logger = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

_HTTP_ERRORS: Final = {404: ("not_found", "there is no such path"), 405: ("method_not_allowed", "")}


def create_app(tokenizers: Tokenizers, config: FrontendConfig) -> ASGIApp:
    """An application that talks through `tokenizers`, which its caller starts and closes."""

    def served_model() -> ServedModel:
        model = tokenizers.model
        if model is None:
            raise ApiError.of_code(UNAVAILABLE, tokenizers.not_ready() or "")
        return model

    async def health(_: Request) -> Response:
        """The event loop runs. Says nothing of the engine: a busy or lost engine is no reason to kill the frontend."""
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        problem = tokenizers.not_ready()
        if problem is not None:
            raise ApiError(503, "not_ready", problem)
        return _json({"status": "ready", "model": served_model().card.name})

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [_model_object(served_model())]})

    async def model(request: Request) -> Response:
        served = served_model()
        if request.path_params["name"] != served.card.name:
            raise ApiError(404, "model_not_found", f"only {served.card.name!r} is served here", "model")
        return _json(_model_object(served))

    # No OpenAPI pages: they load scripts from elsewhere, and the bodies are not declared to the framework.
    app = FastAPI(title="minisgl", openapi_url=None, redirect_slashes=False)
    app.router.routes += [
        Route("/v1/chat/completions", GenerationEndpoint(tokenizers, config, parse_chat), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(tokenizers, config, parse_completion), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
    ]
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return _Outermost(app)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        code, message = _HTTP_ERRORS.get(error.status_code, ("http_error", str(error.detail)))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"this path does not answer {request.method}, only {allowed}"
        error = ApiError(error.status_code, code, message, headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal_error", "the server failed; its log says why")
    return Response(error.body(), error.status, error.headers, "application/json")


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.card.name,
        "object": "model",
        # When the engine started: the first half of an epoch is a time in ms.
        "created": model.epoch[0] // 1000,
        "owned_by": "minisgl",
        "root": model.card.name,
        "parent": None,
        "max_model_len": model.card.max_model_len,
    }


class _Outermost:
    """Around the framework: every answer carries the client's `x-request-id` or a new one, and faults of ours end
    here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = (given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The framework has answered, unless the answer had begun: then it breaks off here, and the server drops
            # the connection.
            logger.exception("%s %s failed", scope["method"], scope["path"])
