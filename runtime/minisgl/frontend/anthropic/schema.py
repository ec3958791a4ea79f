"""JSON schemas of what the parser of POST /v1/messages requires beside types and ranges, for /openapi.json."""

from __future__ import annotations

from typing import Any, Final

from minisgl.frontend.anthropic.bodies import MessagesBody
from minisgl.frontend.anthropic.context_edits import CLEAR_THINKING
from minisgl.frontend.anthropic.tools import OFFERS
from minisgl.frontend.generation.functions import FUNCTION_NAME
from minisgl.frontend.generation.media import MEDIA
from minisgl.frontend.openai.extra_fields import chat_fields

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_JSON_VALUE: Final[Schema] = {"$ref": "#/components/schemas/JsonValue"}


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _content(*blocks: Schema) -> Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_TEXT_BLOCK: Final[Schema] = _object("type", "text", type={"const": "text"}, text=_TEXT)
_TOOL_REFERENCE: Final[Schema] = _object("type", "tool_name", type={"const": "tool_reference"}, tool_name=_TEXT)
_MEDIUM: Final[Schema] = _object(
    "type",
    type={"enum": list(MEDIA)},
    source={"not": _object("type", type={"enum": ["text", "content"]})},
)
_TEXTS: Final[Schema] = _content(_TEXT_BLOCK, _MEDIUM)
_DOCUMENT: Final[Schema] = _object(
    *("type", "source"),
    type={"const": "document"},
    source={
        "anyOf": [
            _object("type", "data", type={"const": "text"}, data=_TEXTS),
            _object("type", "content", type={"const": "content"}, content=_TEXTS),
        ]
    },
)
_SEARCH_RESULT: Final[Schema] = _object("type", "content", type={"const": "search_result"}, content=_TEXTS)
_TOOL_RESULT: Final[Schema] = _object(
    *("type", "tool_use_id"),
    type={"const": "tool_result"},
    tool_use_id=_TEXT,
    content={"anyOf": [{"type": "null"}, _content(_TEXT_BLOCK, _TOOL_REFERENCE, _DOCUMENT, _SEARCH_RESULT, _MEDIUM)]},
)
_TOOL_USE: Final[Schema] = _object(
    *("type", "id", "name", "input"),
    type={"const": "tool_use"},
    id=_TEXT,
    name=_TEXT,
    input={"allOf": [{"type": "object"}, _JSON_VALUE]},
)
_THINKING: Final[Schema] = _object("type", type={"enum": ["thinking", "redacted_thinking"]})

_TOOL: Final[Schema] = _object(
    *("name", "input_schema"),
    type={"enum": ["custom", None]},
    name={"type": "string", "pattern": FUNCTION_NAME},
    description={"type": ["string", "null"]},
    input_schema={"allOf": [_object(type={"const": "object"}), _JSON_VALUE]},
    strict={"type": ["boolean", "null"]},
)
_OFFER: Final[Schema] = _object("type", type={"type": "string", "pattern": f"^({'|'.join(OFFERS)})"})
_HAS_CALLABLE: Final[Schema] = _object("tools", tools={"type": "array", "contains": _TOOL})

_CONVERSATION: Final[Schema] = {
    "properties": {
        "system": {"anyOf": [{"type": "null"}, _content(_TEXT_BLOCK)]},
        "tools": {
            "anyOf": [{"type": "null"}, {"type": "array", "maxItems": 128, "items": {"anyOf": [_TOOL, _OFFER]}}],
        },
    },
    "allOf": [
        {"anyOf": [_object(tool_choice={"not": _object("type", type={"enum": ["any", "tool"]})}), _HAS_CALLABLE]},
        {
            "anyOf": [
                _object("tool_choice", tool_choice=_object("type", type={"const": "none"})),
                _object(tools={"not": {"type": "array", "contains": _OFFER}}),
                _HAS_CALLABLE,
            ]
        },
    ],
}

CHECKED_AFTER_DECODING: Final[dict[str, Schema]] = {
    "MessageParam": {
        "anyOf": [
            _object(role={"const": "user"}, content=_content(_TEXT_BLOCK, _TOOL_RESULT)),
            _object(role={"const": "assistant"}, content=_content(_TEXT_BLOCK, _THINKING, _TOOL_USE)),
            _object(role={"const": "system"}, content=_content(_TEXT_BLOCK)),
        ]
    },
    "ContextEdit": {"properties": {"type": {"const": CLEAR_THINKING}}},
    "CountTokensBody": _CONVERSATION,
    "MessagesBody": {
        **_CONVERSATION,
        "properties": {
            **_CONVERSATION["properties"],
            **{name: {"type": "null"} for name in chat_fields(MessagesBody)},
        },
    },
}
"""By struct. That a choice names one of the tools, that their names are unique, and that a last message of the
assistant has text, no schema can say."""
