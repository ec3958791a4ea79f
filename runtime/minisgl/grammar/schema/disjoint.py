"""Proof that no value is valid under two schemas, with which `oneOf` means the same as `anyOf`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minisgl.grammar.schema.reader import TYPES, Schema

_MAX_STEPS: Final = 20_000
"""Comparisons for one schema, after which two schemas count as overlapping."""
_MAX_DEPTH: Final = 12


class Disjointness:
    """Compares schemas within one root, which has all definitions in `$defs`."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._steps = 0
        # By id, since references lead to the same schemas again and again. The root keeps them alive.
        self._known_types: dict[tuple[int, int], frozenset[str]] = {}
        self._known_constants: dict[int, frozenset[Any] | None] = {}

    def all_disjoint(self, branches: list[Schema]) -> bool:
        """True: each value is valid under at most one of the schemas. False: unknown."""
        pairs = ((one, other) for i, one in enumerate(branches) for other in branches[i + 1 :])
        return all(self._disjoint(one, other, _MAX_DEPTH) for one, other in pairs)

    def _disjoint(self, one: Schema, other: Schema, depth: int) -> bool:
        self._steps += 1
        if one is False or other is False:
            return True
        if one is True or other is True or depth == 0 or self._steps > _MAX_STEPS:
            return False
        if not _overlap(self._types(one, depth), self._types(other, depth)):
            return True
        for schema, rest in ((one, other), (other, one)):
            if "$ref" in schema and self._disjoint(self._target(schema), rest, depth - 1):
                return True
            if any(self._disjoint(part, rest, depth - 1) for part in schema.get("allOf", ())):
                return True
            for keyword in ("anyOf", "oneOf"):
                if keyword in schema and all(self._disjoint(part, rest, depth - 1) for part in schema[keyword]):
                    return True
        return self._constants_differ(one, other) or self._properties_differ(one, other, depth)

    def _types(self, schema: Schema, depth: int) -> frozenset[str]:
        """Return types, among them all that a valid value may have."""
        if schema is False:
            return frozenset()
        if schema is True or depth == 0:
            return TYPES
        key = id(schema), depth
        if (known := self._known_types.get(key)) is None:
            known = self._known_types[key] = self._read_types(schema, depth)
        return known

    def _read_types(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        types = TYPES
        if "type" in schema:
            given = schema["type"]
            types = frozenset(given if isinstance(given, list) else [given])
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            types = _both(types, frozenset(map(type_of, values)))
        if "$ref" in schema:
            types = _both(types, self._types(self._target(schema), depth - 1))
        for part in schema.get("allOf", ()):
            types = _both(types, self._types(part, depth - 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = [self._types(part, depth - 1) for part in schema[keyword]]
                types = _both(types, frozenset().union(*parts))
        return types

    def _target(self, schema: dict[str, Any]) -> Schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        target: Schema = self._root if schema["$ref"] == "#" else self._root["$defs"][name]
        return target

    def _constants_differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        ours, theirs = self._constants(one), self._constants(other)
        return ours is not None and theirs is not None and ours.isdisjoint(theirs)

    def _constants(self, schema: dict[str, Any]) -> frozenset[Any] | None:
        """Return what stands for the only values of a schema, see `_constant`; None if there may be others."""
        if id(schema) not in self._known_constants:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            self._known_constants[id(schema)] = None if values is None else frozenset(map(_constant, values))
        return self._known_constants[id(schema)]

    def _properties_differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """True: both allow objects alone, and a property that one of them requires has no value valid in both."""
        if self._types(one, depth) != {"object"} or self._types(other, depth) != {"object"}:
            return False
        required = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
        return any(self._disjoint(_property(one, name), _property(other, name), depth - 1) for name in required)


def with_any_of(root: dict[str, Any], *, lenient: bool = False) -> None:
    """Replace each `oneOf` by `anyOf` where it means the same; everywhere if `lenient`."""
    disjointness = Disjointness(root)
    for schema in list(schemas_within(root)):
        branches = schema.get("oneOf")
        if branches is None or not (lenient or len(branches) == 1 or disjointness.all_disjoint(branches)):
            continue
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches


def schemas_within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for part in schema.get(keyword, ()):
            yield from schemas_within(part)
    for keyword in ("properties", "patternProperties", "$defs"):
        for part in schema.get(keyword, {}).values():
            yield from schemas_within(part)
    for keyword in ("items", "additionalProperties"):
        yield from schemas_within(schema.get(keyword))


def _property(schema: dict[str, Any], name: str) -> Schema:
    """Return a schema that the property's value is valid under, whatever else applies."""
    properties = schema.get("properties", {})
    if name in properties:
        known: Schema = properties[name]
        return known
    if "patternProperties" in schema:
        return True
    rest: Schema = schema.get("additionalProperties", True)
    return rest


def _constant(value: Any) -> Any:
    """Return a key that values have in common if they are equal in JSON: 1 is 1.0, but not true. Lists that might be
    equal count as equal, and so do objects."""
    return type(value) if isinstance(value, list | dict) else (isinstance(value, bool), value)


def type_of(value: Any) -> str:
    """Return the JSON type of a value; integers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the types in both sets, where integers are numbers."""
    common = one & other
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        common |= {"integer"}
    return common


def _overlap(one: frozenset[str], other: frozenset[str]) -> bool:
    return bool(_both(one, other))
