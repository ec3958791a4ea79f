"""GET /openapi.json: the bodies that the API takes. A body that the document allows is one that is accepted.

Types and ranges come from the very structs that check them; what is checked behind these, field by field, has its
schema here.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import msgspec

from minisgl.frontend.openai.bodies import (
    CONSTRAINTS,
    DEFAULT_MODEL,
    GRAMMARS,
    MAX_PROMPTS,
    ROLES,
    TOKEN_ID,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    TokenizeBody,
)
from minisgl.version import __version__
from minisgl.wire.text import ServedModel

Schema = dict[str, Any]

_BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": NativeBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

_NAME_A_MODEL: Final = ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody")

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

_NULL: Final[Schema] = {"type": "null"}
_SOME: Final[Schema] = {"type": "array", "minItems": 1}
_TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "title": TOKEN_ID}
_TOKEN_IDS: Final[Schema] = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_LISTS: Final[list[Schema]] = [
    _TOKEN_IDS,
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_PROMPTS,
        "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
    },
]
_PROMPT: Final[Schema] = {"anyOf": [{"type": "string"}, *_LISTS]}


def openapi(model: ServedModel | None) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `model`: the one that is served, whose name and vocabulary bodies must respect."""
    references, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    for name, stricter in _checked_behind().items():
        schemas[name]["properties"] |= stricter.pop("properties", {})
        schemas[name] |= stricter
    # What follows changes parts that several bodies share.
    schemas = copy.deepcopy(schemas)
    if model is not None:
        for name in _NAME_A_MODEL:
            schemas[name]["properties"]["model"] = {"enum": [*model.all_names, DEFAULT_MODEL, None], "default": None}
        _with_last_token(schemas, model.card.vocab_size - 1)
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


def _checked_behind() -> dict[str, Schema]:
    """By struct: what the code that reads it refuses beside wrong types and ranges."""
    body = {
        "response_format": {"anyOf": [_object({"type": {"const": "text"}}, "type"), _NULL]},
        "logit_bias": {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
                    "additionalProperties": {"type": "number"},
                    "maxProperties": 1024,
                },
                _NULL,
            ]
        },
        **dict.fromkeys(CONSTRAINTS, _NULL),
    }
    return {
        "ChatBody": {
            "properties": body
            | dict.fromkeys(("chat_template", "audio", "reasoning_effort", "web_search_options"), _NULL)
            | {"modalities": {"enum": [["text"], None]}}
            | {name: {"enum": ["none", "auto", None]} for name in ("tool_choice", "function_call")},
            "allOf": [
                _needs("tools", _SOME, "tool_choice", {"const": "none"}),
                _needs("functions", _SOME, "function_call", {"const": "none"}),
                _needs("top_logprobs", {"type": "integer"}, "logprobs", {"const": True}),
                _needs("max_tokens", {"const": 0}, "max_completion_tokens", {"type": "integer"}),
            ],
        },
        "Message": {
            "properties": {"role": {"enum": list(ROLES)}, "function_call": _NULL},
            "anyOf": [
                _object({"tool_calls": {"enum": [[], None]}, "content": {"type": ["string", "array"]}}, "content"),
                _object({"tool_calls": _SOME, "role": {"const": "assistant"}}, "tool_calls"),
            ],
        },
        "ContentPart": {
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        "CompletionBody": {"properties": body | {"prompt": _PROMPT, "suffix": {"enum": ["", None]}}},
        "NativeBody": {
            "properties": {
                "text": {"anyOf": [_PROMPT, _NULL]},
                "input_ids": {"anyOf": [*_LISTS, _NULL]},
                "return_logprob": {"enum": [False, None]},
            },
            "oneOf": _exactly_one("text", "input_ids", "prompt"),
        },
        "NativeSampling": {"properties": {"json_schema": _NULL, **dict.fromkeys(GRAMMARS, _NULL)}},
        "TokenizeBody": {"oneOf": _exactly_one("prompt", "messages")},
    }


def _with_last_token(schema: Any, last: int) -> None:
    """Bound every token id in the schema."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["maximum"] = last
        schema = list(schema.values())
    if isinstance(schema, list):
        for one in schema:
            _with_last_token(one, last)


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _needs(name: str, value: Schema, other: str, wanted: Schema) -> Schema:
    """Where the field `name` has such a value, `other` must have the wanted one."""
    return {"anyOf": [_object({name: {"not": value}}), _object({other: wanted}, other)]}


def _exactly_one(*names: str) -> list[Schema]:
    """One of the fields is there, and the others are not, or null."""
    return [_object({one: {"not": _NULL} if one == name else _NULL for one in names}, name) for name in names]
