"""Types that the JSON schema of a tool allows for a parameter, for formats that write values without quotes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

ALL_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_DEPTH: Final = 8
"""Depth of references and alternatives; deeper ones count as any type."""
_MAX_SCHEMAS: Final = 256
"""Schemas that are read for one parameter; further ones count as any type. References may lead to any number."""


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types of a parameter, with `integer` beside `number`; all of them for one that the schema does
    not describe."""
    return _Types(schema).of_property(schema, name, _MAX_DEPTH) or ALL_TYPES


class _Types:
    """Types that schemas within the document `root` allow."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_SCHEMAS

    def of(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or not depth or not self._left:
            return ALL_TYPES
        self._left -= 1
        allowed = ALL_TYPES
        if isinstance(reference := schema.get("$ref"), str):
            allowed &= self.of(_resolved(reference, self._root), depth - 1)
        declared = schema.get("type")
        if declared is not None:
            names = declared if isinstance(declared, list) else [declared]
            known = frozenset(name for name in names if isinstance(name, str) and name in ALL_TYPES)
            # A number may also be an integer, which another schema demands.
            allowed &= (known | {"integer"} if "number" in known else known) or ALL_TYPES
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list):
                kinds = frozenset(map(_type_of, values))
                allowed &= kinds | {"integer"} if "number" in kinds else kinds
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list) and options:
                allowed &= frozenset[str]().union(*(self.of(option, depth - 1) for option in options))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                allowed &= self.of(part, depth - 1)
        return allowed or ALL_TYPES

    def of_property(self, schema: Any, name: str, depth: int) -> frozenset[str]:
        """Return the types of a property of an object under the schema; none if it cannot have the property."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or not depth or not self._left:
            return ALL_TYPES
        self._left -= 1
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            allowed = self.of(properties[name], _MAX_DEPTH)
        elif schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            allowed = frozenset()
        elif schema.get("patternProperties"):
            allowed = ALL_TYPES
        else:
            allowed = self.of(schema.get("additionalProperties"), _MAX_DEPTH)
        if isinstance(reference := schema.get("$ref"), str):
            allowed &= self.of_property(_resolved(reference, self._root), name, depth - 1)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list) and options:
                allowed &= frozenset[str]().union(*(self.of_property(one, name, depth - 1) for one in options))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                allowed &= self.of_property(part, name, depth - 1)
        return allowed


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within the document names; None for others."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case None:
            return "null"
    return "object"


def has_type(value: Any, types: frozenset[str]) -> bool:
    """Return whether a decoded JSON value has one of the types."""
    found = _type_of(value)
    if found == "number" and value.is_integer():
        found = "integer"
    return found in types or ("number" in types and found == "integer")


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, but not true."""
    return value_key(one) == value_key(other)


def value_key(value: Any) -> Hashable:
    """Return a key that JSON values have in common if they are equal."""
    match value:
        case list():
            return "array", tuple(map(value_key, value))
        case dict():
            return "object", frozenset((name, value_key(one)) for name, one in value.items())
    return isinstance(value, bool), value
