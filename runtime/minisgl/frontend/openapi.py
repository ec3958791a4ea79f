"""GET /openapi.json: the bodies that the API takes, from the very types that check them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.frontend.bodies import ChatBody, CompletionBody, DetokenizeBody, NativeBody, TokenizeBody
from minisgl.version import __version__

_BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": NativeBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    references, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for path, reference in zip(_BODIES, references, strict=True):
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {
                    "200": {"description": "The answer, or with `stream` its events."},
                    "default": {
                        "description": "An error.",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                    },
                },
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }
