"""The ASGI application of the API's port: routes and middleware."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.frontend.anthropic.count_tokens import TokenCount
from minisgl.frontend.anthropic.requests import parse_message_request
from minisgl.frontend.anthropic.responses import error_event as anthropic_error
from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ENGINE_UNAVAILABLE, ApiError
from minisgl.frontend.generation.constraint_check import ConstraintCheck
from minisgl.frontend.generation.endpoint import GenerationEndpoint
from minisgl.frontend.generation.model_names import DEFAULT_MODEL, check_model_name
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.generation.response_format import error_event as openai_error
from minisgl.frontend.native.generation_probe import GenerationProbe
from minisgl.frontend.native.information import InformationEndpoints, capabilities
from minisgl.frontend.native.requests import parse_native
from minisgl.frontend.openai.requests import parse_chat, parse_chat_batch, parse_completion, parse_invocation
from minisgl.frontend.openai.tokenization import TokenizationEndpoints
from minisgl.frontend.openapi import openapi
from minisgl.frontend.pooling.requests import (
    parse_classify,
    parse_embeddings,
    parse_rerank,
    parse_rerank_v2,
    parse_score,
    parse_tei_embed,
    parse_tei_predict,
)
from minisgl.frontend.responses.other_routes import InputTokens, compact_response, stored_response
from minisgl.frontend.responses.requests import parse_responses
from minisgl.frontend.responses.responses import early_error as responses_error
from minisgl.frontend.server.auth import ApiKeyMiddleware, KeyFile
from minisgl.frontend.server.metrics_page import MetricsPage
from minisgl.frontend.server.middleware import OPEN_PATHS, with_middleware
from minisgl.frontend.server.request_record import RoutePaths
from minisgl.frontend.server.responses import json_response, on_error
from minisgl.frontend.server.web_pages import WEB_PAGES, web_page
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.version import __version__
from minisgl.wire.text import SamplingDefaults, ServedModel


def create_app(tokenizers: TokenizerPool, config: FrontendConfig, *, on_loopback: bool) -> ASGIApp:
    """Make an application on top of `tokenizers`, which the caller starts and closes. `on_loopback`: only this machine
    can connect. Raises KeyFileError and OriginListError."""

    def served_model() -> ServedModel:
        model = tokenizers.model
        if model is None:
            raise ApiError.from_code(ENGINE_UNAVAILABLE, tokenizers.unavailable_reason() or "")
        return model

    async def health(_: Request) -> Response:
        """Respond while the event loop runs. A busy or lost engine is no reason to kill the frontend."""
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        problem = tokenizers.not_ready_reason()
        if problem is not None:
            raise ApiError(503, "not_ready", problem)
        # While requests are held it is the one that was served last.
        model = tokenizers.model or tokenizers.requests.model
        return json_response({"status": "ready", "model": None if model is None else model.card.name})

    def model_names() -> tuple[str, ...]:
        """Return the names of the model; in a frontend pod also while no engine is routable, because it holds requests
        then. Raises ApiError."""
        if tokenizers.model is None and config.ready_before_engine and config.names:
            tokenizers.check_open()
            tokenizers.check_serving()
            return config.names
        return served_model().all_names

    def model_object(name: str) -> dict[str, Any]:
        known = tokenizers.model or tokenizers.requests.model
        return {
            "id": name,
            "object": "model",
            # Start of the engine: the first half of an epoch is a time in ms. Before the first one, of the frontend.
            "created": started_at if known is None else known.epoch[0] // 1000,
            "owned_by": "minisgl",
            "root": model_names()[0],
            "parent": None,
            "max_model_len": None if known is None else known.card.max_model_len,
            "task": None if known is None else known.card.task,
            "capabilities": None if known is None else capabilities(known),
        }

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [model_object(name) for name in model_names()]})

    async def model(request: Request) -> Response:
        name, names = request.path_params["name"], model_names()
        check_model_name(name, names)
        return json_response(model_object(names[0] if name == DEFAULT_MODEL else name))

    async def version(_: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi_document(_: Request) -> Response:
        return json_response(openapi(tokenizers.model))

    def generation(
        parse: Callable[[bytes, SamplingDefaults], GenerationRequest],
        early_error: Callable[[ApiError], bytes] = openai_error,
    ) -> GenerationEndpoint:
        return GenerationEndpoint(tokenizers, config, constraints, parse, early_error)

    def labels() -> tuple[str, ...]:
        return () if tokenizers.model is None else tokenizers.model.card.labels

    def classify(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
        return parse_classify(raw, defaults, labels())

    def score(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
        known = tokenizers.model or tokenizers.requests.model
        return parse_score(raw, defaults, by_embeddings=known is not None and known.card.task == "embed")

    def predict(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
        return parse_tei_predict(raw, defaults, labels())

    started_at = int(time.time())
    constraints = ConstraintCheck(tokenizers)
    tokenization = TokenizationEndpoints(tokenizers, config)
    information = InformationEndpoints(tokenizers)
    metrics = MetricsPage(
        tokenizers.requests, lambda: tokenizers.names, lambda: tokenizers.knows_load, config.lost_lines_fd
    )
    # Not the framework's OpenAPI: its pages load scripts from elsewhere, and the bodies are not declared to it.
    app = FastAPI(title="minisgl", openapi_url=None, redirect_slashes=False)
    app.router.routes += [
        Route("/v1/chat/completions", generation(parse_chat), methods=["POST"]),
        Route("/v1/chat/completions/batch", generation(parse_chat_batch), methods=["POST"]),
        Route("/v1/completions", generation(parse_completion), methods=["POST"]),
        Route("/v1/responses", generation(parse_responses, responses_error), methods=["POST"]),
        Route("/v1/responses/input_tokens", InputTokens(tokenizers, config).count, methods=["POST"]),
        Route("/v1/responses/compact", compact_response, methods=["POST"]),
        Route("/v1/responses/{name:path}", stored_response, methods=["GET", "POST", "DELETE"]),
        Route("/v1/messages", generation(parse_message_request, anthropic_error), methods=["POST"]),
        Route("/v1/messages/count_tokens", TokenCount(tokenizers, config).count, methods=["POST"]),
        Route("/v1/embeddings", generation(parse_embeddings), methods=["POST"]),
        *(Route(path, generation(parse_rerank), methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
        Route("/v2/rerank", generation(parse_rerank_v2), methods=["POST"]),
        *(Route(path, generation(score), methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(path, generation(classify), methods=["POST"]) for path in ("/v1/classify", "/classify")),
        Route("/embed", generation(parse_tei_embed), methods=["POST"]),
        Route("/predict", generation(predict), methods=["POST"]),
        Route("/generate", generation(parse_native), methods=["POST"]),
        Route("/invocations", generation(parse_invocation), methods=["POST"]),
        *(Route(path, tokenization.tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
        *(Route(path, tokenization.detokenize, methods=["POST"]) for path in ("/detokenize", "/v1/detokenize")),
        Route("/tokenizer_info", tokenization.tokenizer_info),
        Route("/version", version),
        *(Route(path, information.model_info) for path in ("/get_model_info", "/model_info")),
        *(Route(path, information.server_info) for path in ("/get_server_info", "/server_info")),
        Route("/load", information.load),
        Route("/get_load", information.legacy_load),
        Route("/openapi.json", openapi_document),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(path, web_page) for path in WEB_PAGES),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/health_generate", GenerationProbe(tokenizers).__call__, methods=["GET"]),
        Route("/ready", ready),
        # For HEAD, and 405 for other methods: GET never gets here, see `_bypass_framework`.
        Route("/metrics", metrics, methods=["GET"]),
    ]
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    routes = RoutePaths([route for route in app.router.routes if isinstance(route, Route)])
    return with_middleware(
        _bypass_framework(app, "/metrics", metrics),
        routes,
        tokenizers.requests,
        config.access,
        _key_check(config.access.api_keys),
        on_loopback=on_loopback,
        trusts_gateway=config.access.trust_gateway,
    )


def _key_check(file: str | None) -> Callable[[ASGIApp], ASGIApp] | None:
    """Return the middleware that requires a key of this file. Raises KeyFileError."""
    if file is None:
        return None
    keys = KeyFile(Path(file))
    return lambda app: ApiKeyMiddleware(app, keys, OPEN_PATHS)


def _bypass_framework(app: ASGIApp, path: str, page: ASGIApp) -> ASGIApp:
    """Route GET requests of `path` to `page`, which takes less time than the framework needs to find it, and all others
    to `app`, including other methods of `path`."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        matches = scope["method"] == "GET" and scope["path"] == path
        await (page if matches else app)(scope, receive, send)

    return route
