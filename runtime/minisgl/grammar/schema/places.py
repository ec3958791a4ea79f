"""Bound on the optional properties that may come next at one place of an answer.

The parser keeps each of them for each alternative under which the answer may still be valid, and the time for a mask
grows with their square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from minisgl.grammar.schema.reader import Schema

_MAX_ROUNDS: Final = 8

_ARRAY: Final = 4
"""Optional properties for which the items of an array count, whose number is open."""

Objects = dict[int, int]
"""Numbers of optional properties, by the identity of the object that has them."""


def optional_at_once(root: dict[str, Any], most: int) -> int:
    """Return a bound on the optional properties that may come next at one place; any number above `most` if it is
    more. Alternatives count together unless their first property, which must be required, tells them apart."""
    return _Places(root, most).count()


class _TooMany(Exception):
    """The bound is exceeded."""


class _Places:
    def __init__(self, root: dict[str, Any], most: int) -> None:
        self._most = most
        self._definitions: dict[str, Schema] = {**root.get("$defs", {}), "#": root}
        self._objects: dict[str, Objects] = {}
        """By definition, as far as known: references may lead in circles."""

    def count(self) -> int:
        try:
            names = list(self._definitions)
            for _ in range(_MAX_ROUNDS):
                before = dict(self._objects)
                # Definitions mostly refer to later ones, so the last ones are read first, and then in turn.
                names.reverse()
                for name in names:
                    self._objects[name] = self._largest(self._definitions[name])
                if self._objects == before:
                    break
            else:
                return self._most + 1
        except _TooMany:
            return self._most + 1
        return max(map(_total, self._objects.values()))

    def _largest(self, schema: Schema) -> Objects:
        """Return the objects at the place within a value that has the most optional properties."""
        if isinstance(schema, bool):
            return {}
        largest: Objects = {}
        for inner in map(self._largest, _inner(schema)):
            largest = max(largest, inner, key=_total)
        optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
        own = max(optional, _ARRAY if "array" in schema.get("type", ()) else 0)
        if own > _total(largest):
            largest = {id(schema): own}
        if "$ref" in schema:
            largest = self._together([largest, self._objects.get(schema["$ref"].removeprefix("#/$defs/"), {})])
        largest = self._together([largest, *map(self._largest, schema.get("allOf", ()))])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                largest = self._together([largest, self._any_of(schema[keyword])])
        return largest

    def _any_of(self, alternatives: Sequence[Schema]) -> Objects:
        groups: dict[bytes | None, list[Objects]] = {None: []}
        for alternative in alternatives:
            groups.setdefault(self._first_property(alternative), []).append(self._largest(alternative))
        others = groups.pop(None)
        return max((self._together([*group, *others]) for group in groups.values() or [[]]), key=_total)

    def _first_property(self, schema: Schema) -> bytes | None:
        """Return what the first property tells alternatives apart by: its name, with its value if that is constant;
        None: it may be left out."""
        while isinstance(schema, dict) and schema.keys() == {"$ref"} and schema["$ref"] != "#":
            schema = self._definitions[schema["$ref"].removeprefix("#/$defs/")]
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not properties or isinstance(schema, bool) or schema.get("type") != "object":
            return None
        name, value = next(iter(properties.items()))
        if name not in schema.get("required", ()):
            return None
        values = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
        return msgspec.json.encode((name, values[0] if values and len(values) == 1 else None))

    def _together(self, places: Sequence[Objects]) -> Objects:
        """Return the objects of all these places, at which the answer may be at once. Raises _TooMany."""
        given = [objects for objects in places if objects]
        if len(given) < 2:
            return given[0] if given else {}
        together: Objects = {}
        for objects in given:
            together.update(objects)
            if _total(together) > self._most:
                raise _TooMany
        return together


def _inner(schema: dict[str, Any]) -> Iterator[Schema]:
    """Yield the schemas of values within a value."""
    yield from schema.get("properties", {}).values()
    yield from schema.get("patternProperties", {}).values()
    yield from schema.get("prefixItems", ())
    for keyword in ("additionalProperties", "items"):
        if keyword in schema:
            yield schema[keyword]


def _total(objects: Objects) -> int:
    return sum(objects.values())
