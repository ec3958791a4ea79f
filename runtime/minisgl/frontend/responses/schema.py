"""JSON schemas of what the parser of POST /v1/responses requires beside types and ranges, for /openapi.json."""

from __future__ import annotations

from typing import Any, Final

from minisgl.frontend.generation.functions import FUNCTION_NAME
from minisgl.frontend.generation.media import MEDIA
from minisgl.frontend.openai.extra_fields import chat_fields
from minisgl.frontend.responses.bodies import ResponsesBody
from minisgl.frontend.responses.items import LEFT_OUT, ROLES, TEXT_PARTS
from minisgl.frontend.responses.tools import OFFERS

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_NAME: Final[Schema] = {"type": "string", "pattern": FUNCTION_NAME}


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _parts(*kinds: Schema) -> Schema:
    return {"type": "array", "items": {"anyOf": list(kinds)}}


_TEXTS: Final = (
    _object("type", "text", type={"enum": list(TEXT_PARTS)}, text=_TEXT),
    _object("type", "refusal", type={"const": "refusal"}, refusal=_TEXT),
)
_CONTENT: Final[Schema] = {"anyOf": [_TEXT, _parts(*_TEXTS)]}
_RESULT: Final[Schema] = {"anyOf": [_TEXT, _parts(*_TEXTS, _object("type", type={"enum": list(MEDIA)}))]}
_CALL_ID: Final[Schema] = {"call_id": _TEXT}
_ITEM: Final[Schema] = {
    "anyOf": [
        _object("role", "content", type={"enum": ["message", None]}, role={"enum": list(ROLES)}, content=_CONTENT),
        _object(
            "type",
            type={"const": "reasoning"},
            content={"anyOf": [{"type": "null"}, _CONTENT]},
            summary={"anyOf": [{"type": "null"}, _parts(*_TEXTS)]},
        ),
        _object(
            *("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            **_CALL_ID,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _object(
            *("type", "call_id", "name", "input"),
            type={"const": "custom_tool_call"},
            **_CALL_ID,
            name=_TEXT,
            input=_TEXT,
        ),
        _object(
            *("type", "call_id", "output"),
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            **_CALL_ID,
            output=_RESULT,
        ),
        _object("type", type={"enum": list(LEFT_OUT)}),
    ]
}

_PARAMETERS: Final[Schema] = {
    "allOf": [
        {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
        {"$ref": "#/components/schemas/JsonValue"},
    ]
}
_FUNCTION: Final[Schema] = _object(
    *("type", "name"),
    type={"const": "function"},
    name=_NAME,
    description=_TEXT_OR_NULL,
    parameters=_PARAMETERS,
    strict={"type": ["boolean", "null"]},
)
_CUSTOM: Final[Schema] = _object(
    *("type", "name"),
    type={"const": "custom"},
    name=_NAME,
    description=_TEXT_OR_NULL,
    format={
        "anyOf": [
            {"type": "null"},
            _object("type", type={"const": "text"}),
            _object(
                *("type", "syntax", "definition"),
                type={"const": "grammar"},
                syntax={"enum": ["lark", "regex"]},
                definition=_TEXT,
            ),
        ]
    },
)
_NAMESPACE: Final[Schema] = _object(
    *("type", "name", "tools"),
    type={"const": "namespace"},
    name=_NAME,
    description=_TEXT_OR_NULL,
    tools={"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}},
)
_OFFER: Final[Schema] = _object("type", type={"enum": list(OFFERS)})
_CALLABLE: Final[Schema] = {
    "anyOf": [
        {"properties": {"type": {"enum": ["function", "custom"]}}},
        {"properties": {"type": {"const": "namespace"}, "tools": {"minItems": 1}}},
    ]
}
_HAS_CALLABLE: Final[Schema] = _object("tools", tools={"type": "array", "contains": _CALLABLE})
_CHOSEN: Final[Schema] = _object("type", "name", type={"enum": ["function", "custom"]}, name=_TEXT)
_CHOICE: Final[Schema] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _CHOSEN,
        _object(
            *("type", "mode", "tools"),
            type={"const": "allowed_tools"},
            mode={"enum": ["auto", "required"]},
            tools={"type": "array", "minItems": 1, "items": _CHOSEN},
        ),
    ]
}

_PLAIN_TEXT: Final[Schema] = {"properties": {"format": {"properties": {"type": {"const": "text"}}}}}

CHECKED_AFTER_DECODING: Final[dict[str, Schema]] = {
    "InputItem": _ITEM,
    "ResponsesBody": {
        "properties": {
            **{name: {"type": "null"} for name in chat_fields(ResponsesBody)},
            "tools": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "array",
                        "maxItems": 128,
                        "items": {"anyOf": [_FUNCTION, _CUSTOM, _NAMESPACE, _OFFER]},
                    },
                ]
            },
            "tool_choice": _CHOICE,
        },
        "allOf": [
            {"anyOf": [_object(structured_outputs={"type": "null"}), _object(text=_PLAIN_TEXT)]},
            {"anyOf": [_object(tool_choice={"not": {"const": "required"}}), _HAS_CALLABLE]},
            {
                "anyOf": [
                    _object("tool_choice", tool_choice={"const": "none"}),
                    _object(tools={"not": {"type": "array", "contains": _OFFER}}),
                    _HAS_CALLABLE,
                ]
            },
        ],
    },
}
"""By struct. That a choice names one of the tools, and that their names are unique, no schema can say."""
