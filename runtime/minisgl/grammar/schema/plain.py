"""Recognition of schemas that the library certainly accepts, so that nobody waits for its answer."""

from __future__ import annotations

from typing import Any, Final

from minisgl.grammar.schema.disjoint import type_of
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.refusals import EXACT_INTEGER

_KEYWORDS: Final = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "format"),
        *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"),
    }
)
_RANGES: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_MAX_SCHEMAS: Final = 2_000
"""Schemas and values of `enum`."""


def is_plain(root: Schema) -> bool:
    """Return True for a schema without combinations of which the library may find that no value is valid. `root` is
    the result of reading a schema, so its references end."""
    if isinstance(root, bool):
        return root
    left = [root, *root.get("$defs", {}).values()]
    seen = 0
    while left:
        schema = left.pop()
        seen += 1
        if schema is False or seen > _MAX_SCHEMAS:
            return False
        if schema is True:
            continue
        seen += len(schema.get("enum", ()))
        keywords = schema.keys() - {"$defs"}
        if keywords == {"$ref"}:
            continue
        if keywords == {"anyOf"}:
            left += schema["anyOf"]
            continue
        if not keywords <= _KEYWORDS or not _is_satisfiable(schema):
            return False
        left += schema.get("properties", {}).values()
        left += [schema[name] for name in ("items", "additionalProperties") if schema.get(name, False) is not False]
    return True


def _is_satisfiable(schema: dict[str, Any]) -> bool:
    """Whether the keywords of one schema agree, apart from those within it."""
    if any(low in schema and high in schema and schema[low] > schema[high] for low, high in _RANGES):
        return False
    if schema.get("items") is False or any(abs(schema.get(key, 0)) > EXACT_INTEGER for key in _RANGES[2]):
        return False
    if schema.get("type") == "integer" and not all(float(schema.get(key, 0)).is_integer() for key in _RANGES[2]):
        return False
    if schema.get("additionalProperties", True) is False:
        properties = schema.get("properties", {})
        if not all(name in properties for name in schema.get("required", ())):
            return False
    if "enum" not in schema and "const" not in schema:
        return schema.get("format") is None or not schema.keys() & {"minLength", "maxLength"}
    if schema.keys() - {"$defs"} in ({"enum"}, {"const"}):
        return True
    values = schema.get("enum", [schema.get("const")])
    return schema.keys() - {"$defs", "type"} in ({"enum"}, {"const"}) and {type_of(value) for value in values} == {
        schema["type"] if isinstance(schema["type"], str) else None
    }
