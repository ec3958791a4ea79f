"""Schemas as alternatives, without references and combinations at their top: for formats that write a value by what
kind of value it is, and not as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.refusals import Path, too_complex, unsupported
from minisgl.parsing.parameter_types import ALL_TYPES, has_type, value_key

_MAX_STEPS: Final = 2_000
"""Schemas that are read and alternatives that are merged for one schema."""
_VALUES_PER_STEP: Final = 100
_COMBINATIONS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "$defs"})

_NUMERIC: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_LIMITS: Final[Mapping[str, frozenset[str]]] = {
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset(
        {
            *("properties", "patternProperties", "additionalProperties", "required"),
            *("minProperties", "maxProperties"),
        }
    ),
}
"""Keywords that limit values of a type."""


class Part(NamedTuple):
    """Keywords that apply together with those of other parts."""

    path: Path
    """Place in the user's schema."""
    schema: Mapping[str, Any]
    """Without references and combinations of its own; those within it remain."""


class Alternative(NamedTuple):
    """Values that are valid under all of its parts."""

    types: frozenset[str]
    """With `integer` wherever `number` is among them."""
    values: tuple[Any, ...] | None
    """The only values; None: there are others."""
    parts: tuple[Part, ...]

    def is_open(self, kind: str) -> bool:
        """Return whether all values of a type are among them. Those of `number` include all integers."""
        keywords = _LIMITS.get(kind, frozenset())
        return (
            kind in self.types and self.values is None and not any(keywords & part.schema.keys() for part in self.parts)
        )


_ANYTHING: Final = Alternative(ALL_TYPES, None, ())


class Alternatives:
    """Finds the alternatives of schemas within a document that `exact` or `lenient` has read: its references end."""

    def __init__(self, definitions: Mapping[str, Schema], sources: Mapping[str, Path]) -> None:
        """`sources`: places of the definitions in the user's schema."""
        self._definitions = definitions
        self._sources = sources
        self._steps = 0

    def of(self, schema: Schema, path: Path) -> list[Alternative]:
        """Return the alternatives of a schema; none if no value is valid. Raises GrammarError if there are too
        many."""
        self._steps = 0
        return self._of(schema, path)

    def _of(self, schema: Schema, path: Path) -> list[Alternative]:
        self._step(1, path)
        if isinstance(schema, bool):
            return [_ANYTHING] if schema else []
        found = [_own(schema, path)]
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            found = self._both(found, self._of(self._definitions[name], self._sources.get(name, ())), path)
        for i, part in enumerate(schema.get("allOf", ())):
            found = self._both(found, self._of(part, (*path, "allOf", i)), path)
        if "anyOf" in schema:
            options = [self._of(part, (*path, "anyOf", i)) for i, part in enumerate(schema["anyOf"])]
            found = self._both(found, [one for option in options for one in option], path)
        if "oneOf" in schema:
            # Where it means the same, it was read as anyOf.
            raise unsupported((*path, "oneOf"), "a value may be valid under several of the schemas; use anyOf")
        return found

    def _step(self, count: int, path: Path) -> None:
        self._steps += count
        if self._steps > _MAX_STEPS:
            raise too_complex(path, "too many alternatives")

    def _both(self, ones: list[Alternative], others: list[Alternative], path: Path) -> list[Alternative]:
        values = sum(len(one.values or ()) for one in ones) * len(others)
        values += sum(len(other.values or ()) for other in others) * len(ones)
        self._step(len(ones) * len(others) + values // _VALUES_PER_STEP, path)
        pairs = [_merged(one, other) for one in ones for other in others]
        return [pair for pair in pairs if pair.types and pair.values != ()]


def json_schema_of(found: list[Alternative]) -> Schema:
    """Return a schema for the values of these alternatives, which have no values listed."""
    schemas: list[Schema] = []
    for one in found:
        types = sorted(one.types - {"integer"} if "number" in one.types else one.types)
        named: dict[str, Any] = {} if one.types == ALL_TYPES else {"type": types[0] if len(types) == 1 else types}
        parts = [dict(part.schema) for part in one.parts if part.schema.keys() - {"type"}]
        schemas.append({**parts[0], **named} if len(parts) == 1 else {**({"allOf": parts} if parts else {}), **named})
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _own(schema: Mapping[str, Any], path: Path) -> Alternative:
    keywords = {name: value for name, value in schema.items() if name not in _COMBINATIONS}
    types = ALL_TYPES
    if "type" in keywords:
        types = frozenset(keywords["type"] if isinstance(keywords["type"], list) else [keywords["type"]])
        types |= {"integer"} if "number" in types else frozenset()
    own = Alternative(types, None, (Part(path, keywords),) if keywords else ())
    for values in (keywords.get("enum"), [keywords["const"]] if "const" in keywords else None):
        if values is not None:
            own = _merged(own, Alternative(ALL_TYPES, tuple(values), ()))
    return own


def _merged(one: Alternative, other: Alternative) -> Alternative:
    types = one.types & other.types
    values = one.values if one.values is not None else other.values
    if values is not None:
        values = tuple(value for value in values if has_type(value, types))
        if one.values is not None and other.values is not None:
            choices = {value_key(choice) for choice in other.values}
            values = tuple(value for value in values if value_key(value) in choices)
    return Alternative(types, values, one.parts + other.parts)
