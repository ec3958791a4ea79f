"""Schemas of what the parsers of texts to pool require beside types and ranges, for /openapi.json."""

from __future__ import annotations

from typing import Any, Final

from minisgl.frontend.pooling.bodies import FIRST_TEXTS, MAX_INPUTS, SECOND_TEXTS

Schema = dict[str, Any]

_NULL: Final[Schema] = {"type": "null"}
_GIVEN: Final[Schema] = {"not": _NULL}
_TEXT: Final[Schema] = {"type": "string"}


def checked_after_decoding(token_ids: Schema) -> dict[str, Schema]:
    """Return the schemas by struct. `token_ids`: that of a list of them."""
    many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": [_TEXT, token_ids]}}
    inputs = {"anyOf": [_TEXT, token_ids, many]}
    named = {"type": "string", "minLength": 1}
    either: Schema = {
        "properties": {"input": {"anyOf": [*inputs["anyOf"], _NULL]}},
        "oneOf": [_one_of("input", ("messages",)), _one_of("messages", ("input",))],
    }
    begins = _not_both("continue_final_message", {"const": True}, "add_generation_prompt", {"const": True})
    plain = [_not_both("messages", _GIVEN, name, named) for name in ("prompt_name", "input_type")]
    return {
        "EmbeddingsBody": either | {"allOf": [begins, *plain, _not_both("prompt_name", _GIVEN, "input_type", _GIVEN)]},
        "ClassifyBody": either | begins,
        "RerankBody": _not_both("instruct", _GIVEN, "instruction", _GIVEN),
        "ScoreBody": {"allOf": [{"oneOf": _alternatives(names)} for names in (FIRST_TEXTS, SECOND_TEXTS)]},
        "TeiEmbedBody": {"properties": {"inputs": inputs}},
        "TeiPredictBody": {"properties": {"inputs": {"anyOf": [_TEXT, _texts(2), _lists_of_texts()]}}},
    }


def _texts(most: int) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": _TEXT}


def _lists_of_texts() -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _texts(2)}


def _alternatives(names: tuple[str, ...]) -> list[Schema]:
    return [_one_of(name, tuple(other for other in names if other != name)) for name in names]


def _one_of(name: str, others: tuple[str, ...]) -> Schema:
    """Return the schema: the field is given, and the others are absent or null."""
    properties = {name: _GIVEN} | dict.fromkeys(others, _NULL)
    return {"type": "object", "properties": properties, "required": [name]}


def _not_both(name: str, value: Schema, other: str, unwanted: Schema) -> Schema:
    return {"not": {"type": "object", "properties": {name: value, other: unwanted}, "required": [name, other]}}
