"""pydantic's JSON schema made into the structural schema that a CustomResourceDefinition takes.

The two dialects differ: no `$ref`, no `null`, no `additionalProperties: false` (the API server refuses unknown fields
by itself), numbers as in OpenAPI 3.0. What is not known here is an error and never dropped. So is a field without
a description or without a bound: the API server estimates the cost of a CEL rule from the bounds, and refuses a rule
over an unbounded list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_operator.api.base import ApiModel

Schema = dict[str, Any]

# In the order in which they are written.
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
    """The types say something that a CustomResourceDefinition cannot, or leave something unsaid that it needs."""


def structural(part: type[ApiModel]) -> Schema:
    """The structural schema of `part`.

    Raises:
        SchemaError: with the path of the field that cannot be said.
    """
    raw = part.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}), part.__name__)


def _convert(raw: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Schema:
    raw = _resolve(raw, definitions, path)
    unknown = set(raw) - set(_KEYWORDS) - _STRUCTURE - {"additionalProperties"}
    if unknown:
        raise SchemaError(f"{path}: no structural schema for {', '.join(sorted(unknown))}")
    result = {keyword: raw[keyword] for keyword in _KEYWORDS if keyword in raw}
    if "const" in raw:
        result["enum"] = [raw["const"]]
    if "anyOf" in raw:
        if raw["anyOf"] != _INT_OR_STRING or not raw.get("x-kubernetes-int-or-string"):
            raise SchemaError(f"{path}: a union other than with null, or of integer and string for a quantity")
        result["anyOf"] = raw["anyOf"]
        return _bounded(result, path)
    match raw.get("type"):
        case "object":
            result |= _members(raw, definitions, path)
        case "array":
            if "items" not in raw:
                raise SchemaError(f"{path}: a list without a type of its items")
            result.setdefault("x-kubernetes-list-type", "atomic")
            result["items"] = _convert(raw["items"], definitions, f"{path}[]")
        case "integer" if "maximum" in raw:
            result["format"] = "int32" if raw["maximum"] < 2**31 else "int64"
        case "integer" | "string" | "number" | "boolean":
            pass
        case other:
            raise SchemaError(f"{path}: no structural schema for type {other}")
    return _bounded(result, path)


def _resolve(raw: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """`raw` with its reference, and its union with null, replaced by what they stand for. What the field says wins."""
    while True:
        if "$ref" in raw:
            target = definitions[raw["$ref"].removeprefix("#/$defs/")]
        elif "anyOf" in raw and {"type": "null"} in raw["anyOf"]:
            choices = [choice for choice in raw["anyOf"] if choice != {"type": "null"}]
            if len(choices) != 1:
                raise SchemaError(f"{path}: a union of more than one type and null")
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
            raise SchemaError(f"{path}: an object without fields")
        return {"additionalProperties": _convert(additional, definitions, f"{path}.*")}
    if additional is not False:
        raise SchemaError(f"{path}: an object with fields and other fields")
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
    """A field's default as the API server needs it.

    It fills in the fields of an object only when the object is there: an object that has defaults within has `{}` for
    its own. Empty lists and maps are not written: they would fill every object with nothing.
    """
    default = schema.pop("default", None)
    if default in (None, [], {}):
        return schema
    if "properties" in schema:
        if _without_nothing(default) != defaulted(schema):
            raise SchemaError(f"{path}: the default is not what its fields' defaults make")
        default = {}
        if not defaulted(schema):
            return schema
    return {**{key: schema[key] for key in ("description", "type") if key in schema}, "default": default, **schema}


def defaulted(schema: Schema) -> dict[str, Any]:
    """What the API server makes of `{}` where the schema wants this object."""
    result: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        if "default" in field:
            result[name] = defaulted(field) if "properties" in field else field["default"]
    return result


def _without_nothing(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    members = {key: _without_nothing(member) for key, member in value.items()}
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
