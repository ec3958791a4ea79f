"""Search for schemas that only infinite values are valid under, such as a reference to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minisgl.grammar.schema.reader import Schema

_MAX_ROUNDS: Final = 64


def endless(root: dict[str, Any]) -> list[str]:
    """Return the names of definitions, or "#" for the root, under which no finite value is valid.

    Only references make values infinite, so schemas that contradict themselves in another way are not found.
    """
    definitions: dict[str, Schema] = {**root.get("$defs", {}), "#": root}
    finite: set[str] = set()
    for _ in range(_MAX_ROUNDS):
        # Definitions mostly refer to later ones, so the last ones are decided first.
        found = [name for name in reversed(definitions) if name not in finite and _is_finite(definitions[name], finite)]
        if not found:
            return [name for name in definitions if name not in finite]
        finite.update(found)
    return []


def circular(root: dict[str, Any]) -> list[str]:
    """Return the names of definitions, or "#" for the root, that refer to themselves for the same value."""
    definitions: dict[str, Schema] = {**root.get("$defs", {}), "#": root}
    edges = {name: set(_same_value(schema)) for name, schema in definitions.items()}
    # Remove what refers to nothing that is left; circles remain.
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in leaves:
            del edges[name]
    return list(edges)


def _same_value(schema: Schema) -> Iterator[str]:
    """Yield the names of the definitions that apply to the same value as the schema."""
    if isinstance(schema, bool):
        return
    if "$ref" in schema:
        yield schema["$ref"].removeprefix("#/$defs/")
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(keyword, ()):
            yield from _same_value(part)


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    """Whether a finite value is valid, if there are such values for the definitions in `finite`."""
    if isinstance(schema, bool):
        return True
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_is_finite(part, finite) for part in schema[keyword]):
            return False
    if schema.get("type") == "object":
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(_is_finite(properties.get(name, rest), finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])[: schema.get("minItems", 0)]
        more = [schema.get("items", True)] if schema.get("minItems", 0) > len(first) else []
        return all(_is_finite(item, finite) for item in [*first, *more])
    return True
