"""Arguments of a tool one by one, for formats that do not write them as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.grammar import lark
from minisgl.grammar.library import problem_of
from minisgl.grammar.schema.exact import exact, lenient
from minisgl.grammar.schema.plain import is_plain
from minisgl.grammar.schema.reader import Schema
from minisgl.grammar.schema.refusals import Path, too_complex, unsupported
from minisgl.parsing.alternatives import Alternative, Alternatives

_MAX_DEFINITIONS: Final = 512 << 10
"""Bytes of the definitions of one tool, of which each parameter's schema has those that it needs."""
_MAX_PARAMETERS: Final = 2_000
"""Of one tool, in all ways to call it together."""
_MAX_CHECKED: Final = 400
"""Values of one tool that the library checks, a millisecond or two each."""
_ROOT: Final = "root"
"""Definition of the schema itself, to which its parts may refer. Those of the user's schema have other names."""
_MAPS: Final = ("properties", "patternProperties", "$defs")


class Value(NamedTuple):
    """Values of one parameter."""

    schema: Schema
    """With the definitions that it needs; exactly as the library enforces it."""
    path: Path
    """Place in the user's schema."""


class Parameter(NamedTuple):
    name: str
    value: Value
    is_required: bool


class Arguments(NamedTuple):
    """One way to call a tool."""

    parameters: tuple[Parameter, ...]
    """In the order in which they are written."""
    others: Value | None
    """Parameters of any other name, behind those; None: there are none."""


ANYTHING: Final = Arguments((), Value(True, ()))


class ToolSchema:
    """The schema of a tool's arguments, read exactly for a strict tool, or as far as it can be enforced."""

    def __init__(self, schema: Mapping[str, Any], *, is_strict: bool) -> None:
        """Raises GrammarError for a strict tool."""
        self._is_strict = is_strict
        read = (exact if is_strict else lenient)(dict(schema))
        root = _with_root(read.schema)
        self._definitions: dict[str, Schema] = dict(root.get("$defs", {})) if isinstance(root, dict) else {}
        self._sources = dict(read.sources)
        if isinstance(root, dict):
            root = {key: value for key, value in root.items() if key != "$defs"}
        self._root: Schema = root
        self._definitions[_ROOT] = self._root
        self._closures: dict[str, frozenset[str]] = {}
        self._checked = 0
        self._is_too_large = False
        """Parameters that refer to definitions may have any value."""

    def ways(self) -> list[Arguments]:
        """Return all ways to call the tool, at least one. Raises GrammarError for a strict tool."""
        found = [self.arguments(one) for one in self.alternatives(Value(self._root, ())) if "object" in one.types]
        ways = [one for one in found if one is not None]
        if not ways:
            raise unsupported((), "no arguments are valid")
        if sum(len(way.parameters) for way in ways) > _MAX_PARAMETERS:
            raise too_complex((), f"the ways to call it have more than {_MAX_PARAMETERS} parameters together")
        values = [parameter.value for way in ways for parameter in way.parameters]
        sizes = {name: len(msgspec.json.encode(definition)) for name, definition in self._definitions.items()}
        if sum(sizes[name] for value in values for name in self._needed(value.schema)) > _MAX_DEFINITIONS:
            if self._is_strict:
                raise too_complex((), "too many parameters with too large definitions")
            self._is_too_large = True
        return ways

    def alternatives(self, value: Value) -> list[Alternative]:
        """Return the alternatives of a value. Raises GrammarError if there are too many."""
        if self._is_too_large and self._needed(value.schema):
            value = value._replace(schema=True)
        return Alternatives(self._definitions, self._sources).of(value.schema, value.path)

    def json(self, schema: Schema, path: Path) -> str:
        """Return an expression for JSON under a schema. Raises GrammarError for a strict tool."""
        schema = self._with_definitions(schema)
        expression = lark.exact_json(schema)
        problem = "" if is_plain(schema) else self._problem(expression, path)
        if not problem:
            return expression
        if self._is_strict:
            raise unsupported(path, problem)
        is_object = isinstance(schema, dict) and schema.get("type") == "object"
        return lark.exact_json({"type": "object"} if is_object else True)

    def _problem(self, expression: str, path: Path) -> str:
        """Return why the library cannot enforce an expression; empty if it can. Raises GrammarError for a strict tool
        with too many."""
        self._checked += 1
        if self._checked <= _MAX_CHECKED:
            return problem_of(lark.grammar(f"start: {expression}"))
        if self._is_strict:
            raise too_complex(path, f"more than {_MAX_CHECKED} parameters with combinations of schemas")
        return "not checked"

    def arguments(self, way: Alternative) -> Arguments | None:
        """Return the arguments of one alternative; None if it has none that can be written."""
        names = dict.fromkeys(name for part in way.parts for name in part.schema.get("properties", ()))
        is_listed = any("properties" in part.schema for part in way.parts)
        required = dict.fromkeys(name for part in way.parts for name in part.schema.get("required", ()))
        parameters: list[Parameter] = []
        for name in names | required:
            value = self._property(way, name)
            if value.schema is not False:
                parameters.append(Parameter(name, value, name in required))
            elif name in required:
                return None
        # A model seldom needs more than those that are listed.
        others = None if is_listed else self._property(way, None)
        if others is not None and others.schema is False:
            others = None
        if self._is_strict:
            _check_enforceable(way, len(required), len(parameters), has_others=others is not None)
        return Arguments(tuple(parameters), others)

    def _property(self, way: Alternative, name: str | None) -> Value:
        """Return the values of a property, or of those that are not listed."""
        found: list[Value] = []
        for path, schema in way.parts:
            if name is not None and name in schema.get("properties", ()):
                found.append(Value(schema["properties"][name], (*path, "properties", name)))
            elif "additionalProperties" in schema and not schema.get("patternProperties"):
                found.append(Value(schema["additionalProperties"], (*path, "additionalProperties")))
        found = [value for value in found if value.schema is not True]
        if any(value.schema is False for value in found):
            return Value(False, ())
        if len(found) == 1:
            return found[0]
        return Value({"allOf": [value.schema for value in found]}, found[0].path) if found else Value(True, ())

    def _with_definitions(self, schema: Schema) -> Schema:
        """Return the schema with the definitions that it needs."""
        needed = self._needed(schema)
        if not needed or isinstance(schema, bool):
            return schema
        return True if self._is_too_large else {**schema, "$defs": {name: self._definitions[name] for name in needed}}

    def _needed(self, schema: Schema) -> list[str]:
        """Return the names of the definitions that a schema leads to."""
        names = {name: None for reference in _references(schema) for name in sorted(self._closure(reference))}
        return [*names]

    def _closure(self, reference: str) -> frozenset[str]:
        """Return the name of a definition, and of those that it leads to."""
        if (known := self._closures.get(reference)) is None:
            found: set[str] = set()
            left = [reference]
            while left:
                name = left.pop().removeprefix("#/$defs/")
                if name not in found:
                    found.add(name)
                    left += _references(self._definitions[name])
            known = self._closures[reference] = frozenset(found)
        return known


def _check_enforceable(way: Alternative, required: int, written: int, *, has_others: bool) -> None:
    """Refuse what arguments that are written one by one need not satisfy. Raises GrammarError."""
    if way.values is not None:
        raise unsupported(way.parts[0].path, "the model's format of calls cannot be limited to whole objects")
    for path, schema in way.parts:
        if schema.get("patternProperties"):
            raise unsupported(
                (*path, "patternProperties"), "the model's format of calls cannot be limited to names of a pattern"
            )
        if schema.get("minProperties", 0) > required or (
            "maxProperties" in schema and (has_others or schema["maxProperties"] < written)
        ):
            keyword = "maxProperties" if "maxProperties" in schema else "minProperties"
            raise unsupported((*path, keyword), "the model's format of calls does not limit the number of arguments")


def _with_root(schema: Any) -> Any:
    """Return a schema whose references to the whole lead to a definition."""
    if isinstance(schema, list):
        return [_with_root(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{_ROOT}"
        if key == "$ref" and value == "#"
        else {name: _with_root(one) for name, one in value.items()}
        if key in _MAPS
        else value
        if key in ("enum", "const")
        else _with_root(value)
        for key, value in schema.items()
    }


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema and of all schemas within it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            elif key in _MAPS:
                for one in value.values():
                    yield from _references(one)
            elif key not in ("enum", "const"):
                yield from _references(value)
