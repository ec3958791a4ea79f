"""The ASGI application: routes and error bodies. No state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation import GenerationEndpoint
from minisgl.frontend.metrics.page import MetricsPage
from minisgl.frontend.openai.bodies import DEFAULT_MODEL
from minisgl.frontend.openai.openapi import openapi
from minisgl.frontend.openai.requests import parse_chat, parse_completion, parse_native
from minisgl.frontend.openai.tokenization import TokenizationEndpoints
from minisgl.frontend.server.middleware import note_error, observed
from minisgl.frontend.tokenizers import UNAVAILABLE, Tokenizers
from minisgl.version import __version__
from minisgl.wire.text import ServedModel

_CHAT_PAGE: Final = Path(__file__).parent / "static" / "chat.html"
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
        served = served_model()
        return _json({"object": "list", "data": [_model_object(served, name) for name in served.all_names]})

    async def model(request: Request) -> Response:
        served = served_model()
        name = request.path_params["name"]
        if name not in (*served.all_names, DEFAULT_MODEL):
            raise ApiError(404, "model_not_found", f"only {served.card.name!r} is served here", "model")
        return _json(_model_object(served, served.card.name if name == DEFAULT_MODEL else name))

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def chat_page(_: Request) -> Response:
        return Response(_CHAT_PAGE.read_bytes(), media_type="text/html")

    async def openapi_document(_: Request) -> Response:
        return _json(openapi(tokenizers.model))

    tokenization = TokenizationEndpoints(tokenizers, config)
    metrics = MetricsPage(tokenizers)
    # Not the framework's OpenAPI: its pages load scripts from elsewhere, and the bodies are not declared to it.
    app = FastAPI(title="minisgl", openapi_url=None, redirect_slashes=False)
    app.router.routes += [
        Route("/v1/chat/completions", GenerationEndpoint(tokenizers, config, parse_chat), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(tokenizers, config, parse_completion), methods=["POST"]),
        Route("/generate", GenerationEndpoint(tokenizers, config, parse_native), methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenization.tokenizer_info),
        Route("/version", version),
        Route("/openapi.json", openapi_document),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/", chat_page),
        Route("/health", health),
        Route("/ready", ready),
        # For HEAD, and 405 for the rest: GET never comes this far, see `_past_framework`.
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return observed(_past_framework(app, "/metrics", metrics), tokenizers.traffic, config)


def _past_framework(app: ASGIApp, path: str, page: ASGIApp) -> ASGIApp:
    """`page` answers GET of `path` itself: it takes less time than the framework needs to find it. `app` answers all
    the rest, other methods of `path` among them."""

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["method"] == "GET" and scope["path"] == path
        await (page if asked else app)(scope, receive, send)

    return choose


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        code, message = _HTTP_ERRORS.get(error.status_code, ("http_error", str(error.detail)))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"this path does not answer {request.method}, only {allowed}"
        error = ApiError(error.status_code, code, message, headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal_error", "the server failed; its log says why")
    note_error(error)
    return Response(error.body(), error.status, error.headers, "application/json")


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _model_object(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        # When the engine started: the first half of an epoch is a time in ms.
        "created": model.epoch[0] // 1000,
        "owned_by": "minisgl",
        "root": model.card.name,
        "parent": None,
        "max_model_len": model.card.max_model_len,
    }
