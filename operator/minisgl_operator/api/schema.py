"""Conversion of pydantic's JSON schema to the structural schema of a CustomResourceDefinition.

The dialects differ: no `$ref`, no `null`, no `additionalProperties: false` (the API server rejects unknown fields
anyway), numbers as in OpenAPI 3.0. Unknown keywords are errors and never dropped. So are fields without a description
or without bounds: the API server estimates the cost of a CEL rule from the bounds, and rejects rules over unbounded
lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_operator.api.base import ApiModel

Schema = dict[str, Any]

# In the order of the output.
_KEYWORDS: Final = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
)
_STRUCTURE: Final = frozenset({"$ref", "$defs", "title", "const", "anyOf", "items", "properties", "required"})
_INT_OR_STRING: Final = [{"type": "integer"}, {"type": "string"}]


class SchemaError(Exception):
    """A type cannot be expressed in a CustomResourceDefinition, or lacks something that it requires."""


def structural(model: type[ApiModel]) -> Schema:
    """The structural schema of a type.

    Raises:
        SchemaError: with the path of the field that cannot be expressed.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}), model.__name__)


def _convert(raw: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Schema:
    raw = _resolve(raw, definitions, path)
    unknown = set(raw) - set(_KEYWORDS) - _STRUCTURE - {"additionalProperties"}
    if unknown:
        raise SchemaError(f"{path}: keywords without structural schema: {', '.join(sorted(unknown))}")
    result = {keyword: raw[keyword] for keyword in _KEYWORDS if keyword in raw}
    if "description" in raw:
        # Descriptions are docstrings: their line breaks have no meaning.
        result["description"] = " ".join(raw["description"].split())
    if "const" in raw:
        result["enum"] = [raw["const"]]
    if "anyOf" in raw:
        if raw["anyOf"] != _INT_OR_STRING or not raw.get("x-kubernetes-int-or-string"):
            raise SchemaError(f"{path}: a union is neither with null nor the integer or string of a quantity")
        result["anyOf"] = raw["anyOf"]
        return _bounded(result, path)
    match raw.get("type"):
        case "object":
            result |= _members(raw, definitions, path)
        case "array":
            if "items" not in raw:
                raise SchemaError(f"{path}: the items of a list have no type")
            result.setdefault("x-kubernetes-list-type", "atomic")
            result["items"] = _convert(raw["items"], definitions, f"{path}[]")
        case "integer" if "maximum" in raw:
            result["format"] = "int32" if raw["maximum"] < 2**31 else "int64"
        case "integer" | "string" | "number" | "boolean":
            pass
        case other:
            raise SchemaError(f"{path}: type {other} has no structural schema")
    return _bounded(result, path)


def _resolve(raw: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """`raw` with its reference, or its union with null, replaced by the target. Keywords of the field take
    precedence."""
    while True:
        if "$ref" in raw:
            target = definitions[raw["$ref"].removeprefix("#/$defs/")]
        elif "anyOf" in raw and {"type": "null"} in raw["anyOf"]:
            choices = [choice for choice in raw["anyOf"] if choice != {"type": "null"}]
            if len(choices) != 1:
                raise SchemaError(f"{path}: a union has more than one type besides null")
            target = choices[0]
        else:
            return raw
        raw = {**target, **{key: value for key, value in raw.items() if key not in ("$ref", "anyOf")}}


def _members(raw: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Schema:
    additional = raw.get("additionalProperties")
    if "properties" not in raw:
        if additional is True:
            return {"x-kubernetes-preserve-unknown-fields": True}
        if not isinstance(additional, dict):
            raise SchemaError(f"{path}: an object has no fields")
        return {"additionalProperties": _convert(additional, definitions, f"{path}.*")}
    if additional is not False:
        raise SchemaError(f"{path}: an object with fields allows other fields")
    properties = {}
    for name, field in raw["properties"].items():
        where = f"{path}.{name}"
        converted = _convert(field, definitions, where)
        if "description" not in converted:
            raise SchemaError(f"{where}: no description")
        properties[name] = _with_default(converted, where)
    members: Schema = {"properties": properties}
    if "required" in raw:
        members["required"] = raw["required"]
    return members


def _with_default(schema: Schema, path: str) -> Schema:
    """The schema with its default as the API server needs it.

    The API server sets defaults of an object's fields only if the object exists: so an object with defaults in its
    fields has the default `{}`. Empty lists and maps are no defaults: they would appear in every object.
    """
    default = schema.pop("default", None)
    if default in (None, [], {}):
        return schema
    if "properties" in schema:
        if _without_empty(default) != defaulted(schema):
            raise SchemaError(f"{path}: the default differs from the defaults of the fields")
        default = {}
        if not defaulted(schema):
            return schema
    return {**{key: schema[key] for key in ("description", "type") if key in schema}, "default": default, **schema}


def defaulted(schema: Schema) -> dict[str, Any]:
    """The object that the API server makes of `{}` for this schema."""
    result: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        if "default" in field:
            result[name] = defaulted(field) if "properties" in field else field["default"]
    return result


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    members = {key: _without_empty(member) for key, member in value.items()}
    return {key: member for key, member in members.items() if member not in (None, [], {})}


def _bounded(schema: Schema, path: str) -> Schema:
    needed: tuple[str, ...] = ()
    match schema.get("type"):
        case "string" if "enum" not in schema and schema.get("format") != "date-time":
            needed = ("maxLength",)
        case "integer":
            needed = ("minimum", "maximum")
        case "array":
            needed = ("maxItems",)
        case "object" if "properties" not in schema:
            needed = ("maxProperties",)
        case None:
            needed = ("maxLength",)
    missing = [keyword for keyword in needed if keyword not in schema]
    if missing:
        raise SchemaError(f"{path}: no {' and no '.join(missing)}")
    return schema
