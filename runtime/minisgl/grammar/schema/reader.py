"""From a user's schema to one that llguidance enforces exactly, or an error with the place in the schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, ParamSpec

from minisgl.errors import GrammarError
from minisgl.grammar.schema.formats import LIBRARY, PATTERNS, UNSUPPORTED
from minisgl.grammar.schema.patterns import translate
from minisgl.grammar.schema.refusals import (
    EXACT_INTEGER,
    MAX_DEPTH,
    MAX_ENUM,
    MAX_LENGTH,
    MAX_LEVELS,
    MAX_NODES,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    Path,
    pointer,
    too_complex,
    unsupported,
)
from minisgl.grammar.schema.values import (
    at_least,
    at_most,
    check_constant,
    check_divisor,
    check_text,
    inside,
    length,
    number,
)

_P = ParamSpec("_P")

Schema = dict[str, Any] | bool
TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_REF_ALONE: Final = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which a schema with `$ref` has no other keywords."""
_OLD_DRAFTS: Final = (*_REF_ALONE, "2019-09")

_NO_EFFECT: Final[dict[str, Callable[[Any], bool]]] = {
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    "contains": lambda value: False,
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "unevaluatedProperties": lambda value: value is True or value == {},
    "unevaluatedItems": lambda value: value is True or value == {},
    "$dynamicRef": lambda value: False,
    "$recursiveRef": lambda value: False,
}
"""Keywords that are not supported, and whether a value of theirs means nothing."""


class Reader:
    """Reads one schema: the root, and the definitions that it uses, each once."""

    def __init__(self, root: Schema, *, lenient: bool = False) -> None:
        """`lenient`: leave out keywords that are not supported, as if they were not there."""
        self._root = root
        self._is_lenient = lenient
        draft = root.get("$schema", "") if isinstance(root, dict) else ""
        self._is_old = isinstance(draft, str) and any(name in draft for name in _OLD_DRAFTS)
        self._is_ref_alone = self._is_old and any(name in draft for name in _REF_ALONE)
        self._names: dict[Path, str] = {}
        self._nodes = 0
        self._deepest = 0
        self.sources: dict[str, Path] = {}
        """Path of each definition in the user's schema, by its new name."""

    def read(self) -> Schema:
        """Return the schema. Raises GrammarError."""
        start = self._schema(self._root, (), 0)
        levels = self._deepest
        definitions: dict[str, Schema] = {}
        while len(definitions) < len(self.sources):
            name = list(self.sources)[len(definitions)]
            self._deepest = 0
            definitions[name] = self._schema(self._resolve(self.sources[name]), self.sources[name], 0)
            levels += self._deepest
            if levels > MAX_LEVELS:
                raise too_complex(self.sources[name], f"the definitions have more than {MAX_LEVELS} levels together")
        if not definitions or isinstance(start, bool):
            return start
        return {**start, "$defs": definitions}

    def _schema(self, schema: Any, path: Path, depth: int) -> Schema:
        self._nodes += 1
        self._deepest = max(self._deepest, depth + 1)
        if self._nodes > MAX_NODES:
            raise too_complex(path, f"the schema contains more than {MAX_NODES} schemas")
        if depth > MAX_DEPTH:
            raise too_complex(path, f"schemas are nested more than {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise unsupported(path, "expected a schema: an object, true or false")
        if self._is_ref_alone and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        result: dict[str, Any] = {}
        for keyword in schema:
            self._attempt(self._keyword, schema, (*path, keyword), depth, result)
        self._attempt(_finish_format, schema, result, path)
        self._attempt(_finish_numbers, result, path)
        self._attempt(_finish_object, schema, result, path)
        return result

    def _attempt(self, read: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            read(*args, **kwargs)
        except GrammarError as error:
            if not self._is_lenient or error.code != "unsupported_schema":
                raise

    def _keyword(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        if (read := _READERS.get(keyword)) is not None:
            read(self, schema, path, depth, result)
        elif (is_nothing := _NO_EFFECT.get(keyword)) is not None and not is_nothing(schema[keyword]):
            raise unsupported(path, f"the keyword {keyword!r} is not supported")

    # References

    def _reference(self, text: Any, path: Path) -> str:
        """Return the new name of a reference's target."""
        if not isinstance(text, str):
            raise unsupported(path, "expected a text")
        base, _, fragment = text.partition("#")
        root_id = self._root.get("$id", self._root.get("id", "")) if isinstance(self._root, dict) else ""
        if base and base != str(root_id).rstrip("#"):
            raise unsupported(path, f"the reference {text[:100]!r} is not within the schema; copy it into $defs")
        if fragment and not fragment.startswith("/"):
            raise unsupported(path, f"the reference {text[:100]!r} is an anchor, which is not supported; use a path")
        steps = tuple(step.replace("~1", "/").replace("~0", "~") for step in _unquoted(fragment).split("/")[1:])
        self._resolve(steps, path)
        if not steps:
            return "#"
        if steps not in self._names:
            name = f"d{len(self._names)}"
            self._names[steps] = name
            self.sources[name] = steps
        return f"#/$defs/{self._names[steps]}"

    def _resolve(self, steps: Path, path: Path = ()) -> Any:
        target: Any = self._root
        for step in steps:
            try:
                target = target[int(step)] if isinstance(target, list) else target[step]
            except (LookupError, TypeError, ValueError):
                raise unsupported(path, f"the reference's target {pointer(steps)} does not exist") from None
        return target

    # Keywords, each of which writes its own into the result

    def _ref(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        result["$ref"] = self._reference(schema["$ref"], path)

    def _type(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["type"]
        types = value if isinstance(value, list) else [value]
        for one in types:
            if not isinstance(one, str) or one not in TYPES:
                raise unsupported(path, f"{str(one)[:40]!r} is not a type; expected one of {', '.join(sorted(TYPES))}")
        if not types:
            raise unsupported(path, "expected at least one type")
        result["type"] = value

    def _constants(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        value = schema[keyword]
        if keyword == "enum" and (not isinstance(value, list) or not 0 < len(value) <= MAX_ENUM):
            raise unsupported(path, f"expected a list of 1 to {MAX_ENUM} values")
        check_constant(value, path)
        result[keyword] = value

    def _each(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        value = schema[keyword]
        if not isinstance(value, list) or not value:
            raise unsupported(path, "expected a list of at least one schema")
        result[keyword] = [self._schema(item, (*path, i), depth + 1) for i, item in enumerate(value)]

    def _items(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["items"]
        if not isinstance(value, list):
            result["items"] = self._schema(value, path, depth + 1)
        elif self._is_old:
            result["prefixItems"] = [self._schema(item, (*path, i), depth + 1) for i, item in enumerate(value)]
            if "additionalItems" in schema:
                rest = (*path[:-1], "additionalItems")
                result["items"] = self._schema(schema["additionalItems"], rest, depth + 1)
        else:
            raise unsupported(path, "a list of schemas is prefixItems since draft 2020-12; rename it, or set $schema")

    def _prefix_items(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        if not self._is_old:
            self._each(schema, path, depth, result)

    def _properties(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["properties"]
        if not isinstance(value, dict):
            raise unsupported(path, "expected an object")
        if len(value) > MAX_PROPERTIES:
            raise too_complex(path, f"more than {MAX_PROPERTIES} properties are not supported")
        properties = {}
        for name, property in value.items():
            check_text(name, (*path, name))
            properties[name] = self._schema(property, (*path, name), depth + 1)
        result["properties"] = properties

    def _pattern_properties(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["patternProperties"]
        if not isinstance(value, dict):
            raise unsupported(path, "expected an object")
        if len(value) > MAX_PATTERN_PROPERTIES:
            raise too_complex(path, f"more than {MAX_PATTERN_PROPERTIES} patterns are not supported")
        patterns: dict[str, Schema] = {}
        for pattern, property in value.items():
            translated = _translated(pattern, (*path, pattern))
            read = self._schema(property, (*path, pattern), depth + 1)
            patterns[translated] = {"allOf": [patterns[translated], read]} if translated in patterns else read
        result["patternProperties"] = patterns

    def _one_schema(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        result[keyword] = self._schema(schema[keyword], path, depth + 1)

    def _property_names(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        names = self._schema(schema["propertyNames"], path, depth + 1)
        if names is True or names in ({}, {"type": "string"}):
            return
        if isinstance(names, bool) or schema.get("properties") or schema.get("patternProperties"):
            raise unsupported(path, "the keyword 'propertyNames' is only supported without properties")
        rest = schema.get("additionalProperties", True)
        values = self._schema(rest, (*path[:-1], "additionalProperties"), depth + 1)
        keywords = {name: value for name, value in names.items() if name != "type"}
        if keywords.keys() <= {"enum", "const"}:
            allowed = keywords.get("enum", [keywords.get("const")])
            result["properties"] = {name: values for name in allowed if isinstance(name, str)}
        elif keywords.keys() == {"pattern"}:
            result["patternProperties"] = {keywords["pattern"]: values}
        elif keywords.keys() <= {"minLength", "maxLength"}:
            most = keywords.get("maxLength", "")
            result["patternProperties"] = {f"^(?s:.){{{keywords.get('minLength', 0)},{most}}}$": values}
        else:
            raise unsupported(path, "propertyNames are only supported with enum, const, pattern or lengths")
        result["additionalProperties"] = False

    def _additional_properties(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        if result.get("additionalProperties") is not False:
            self._one_schema(schema, path, depth, result)

    def _unevaluated_properties(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["unevaluatedProperties"]
        if value is True or value == {}:
            return
        if "additionalProperties" in schema:
            return
        if schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}:
            raise unsupported(path, "the keyword 'unevaluatedProperties' is not supported beside other schemas")
        result["additionalProperties"] = self._schema(value, path, depth + 1)

    def _required(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        value = schema["required"]
        if isinstance(value, bool) and self._is_old:
            return
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise unsupported(path, "expected a list of texts")
        for name in value:
            check_text(name, path)
        result["required"] = list(dict.fromkeys(value))

    def _length(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        limit = length(schema[keyword], path)
        if limit < MAX_LENGTH:
            result[keyword] = limit
        elif keyword.startswith("min"):
            raise too_complex(path, f"more than {MAX_LENGTH} are not supported")

    def _number(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        keyword = str(path[-1])
        value = schema[keyword]
        if self._is_old and isinstance(value, bool) and keyword.startswith("exclusive"):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                result[keyword] = number(schema[bound], (*path[:-1], bound))
            return
        given = number(value, path)
        if keyword == "multipleOf":
            check_divisor(given, path)
        result[keyword] = given

    def _pattern(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        if not isinstance(schema["pattern"], str):
            raise unsupported(path, "expected a text")
        result["pattern"] = _translated(schema["pattern"], path)

    def _unique_items(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        at_most_one = schema.get("maxItems") in (0, 1)
        if schema["uniqueItems"] is not False and not at_most_one:
            raise unsupported(path, "the keyword 'uniqueItems' is not supported")

    def _condition(self, schema: dict[str, Any], path: Path, depth: int, result: dict[str, Any]) -> None:
        if "if" in schema and ("then" in schema or "else" in schema):
            raise unsupported(path, "the keywords 'if', 'then' and 'else' are not supported")


_Read = Callable[[Reader, dict[str, Any], Path, int, dict[str, Any]], None]
_READERS: Final[dict[str, _Read]] = {
    "$ref": Reader._ref,
    "type": Reader._type,
    "const": Reader._constants,
    "enum": Reader._constants,
    "anyOf": Reader._each,
    "oneOf": Reader._each,
    "allOf": Reader._each,
    "items": Reader._items,
    "prefixItems": Reader._prefix_items,
    "properties": Reader._properties,
    "patternProperties": Reader._pattern_properties,
    "propertyNames": Reader._property_names,
    "additionalProperties": Reader._additional_properties,
    "unevaluatedProperties": Reader._unevaluated_properties,
    "required": Reader._required,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Reader._length),
    **dict.fromkeys(("minProperties", "maxProperties"), Reader._length),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), Reader._number),
    "pattern": Reader._pattern,
    "uniqueItems": Reader._unique_items,
    **dict.fromkeys(("if", "then", "else"), Reader._condition),
}


def _unquoted(fragment: str) -> str:
    """Return the fragment of a URI without its percent escapes."""
    if "%" not in fragment:
        return fragment
    quoted = fragment.encode("utf-8", "surrogatepass")
    plain = re.sub(rb"%([0-9A-Fa-f]{2})", lambda escape: bytes.fromhex(escape[1].decode()), quoted)
    return plain.decode(errors="replace")


def _translated(pattern: str, path: Path) -> str:
    try:
        return translate(pattern, of_schema=True)
    except GrammarError as error:
        where = pointer(path)
        raise GrammarError(error.code, f"{where}: {error.message}", where) from None


def _finish_format(schema: dict[str, Any], result: dict[str, Any], path: Path) -> None:
    """Enforce the format of a string, or leave out one that is a note."""
    format = schema.get("format")
    types = schema.get("type", "string")
    if not isinstance(format, str) or not ("string" in types if isinstance(types, list) else types == "string"):
        return
    if format in UNSUPPORTED:
        raise unsupported((*path, "format"), f"the format {format[:40]!r} is not supported")
    if format in LIBRARY:
        result["format"] = format
    elif format in PATTERNS and "pattern" in result:
        result["allOf"] = [*result.get("allOf", ()), {"pattern": PATTERNS[format]}]
    elif format in PATTERNS:
        result["pattern"] = PATTERNS[format]


def _finish_numbers(result: dict[str, Any], path: Path) -> None:
    """Make bounds exact, and inclusive where the library would take them for inclusive."""
    lows = [name for name in ("minimum", "exclusiveMinimum") if name in result]
    highs = [name for name in ("maximum", "exclusiveMaximum") if name in result]
    if not lows and not highs:
        return
    result.update({name: at_least(result[name]) for name in lows})
    result.update({name: at_most(result[name]) for name in highs})
    low = max((result[name] for name in lows), default=None)
    high = min((result[name] for name in highs), default=None)
    if low is None or high is None or result.get("type") == "integer":
        return
    # An integer may be too large for the difference to a float.
    if Decimal(high) - Decimal(low) >= 1:
        return
    if max(abs(low), abs(high)) > EXACT_INTEGER:
        for name in (*lows, *highs):
            del result[name]
        raise unsupported(path, "bounds beyond 2**53 that are less than 1 apart are not supported")
    if result.get("exclusiveMinimum") == low >= 0 and float(low).is_integer():
        result["minimum"] = inside(result.pop("exclusiveMinimum"), upwards=True)
    if result.get("exclusiveMaximum") == high <= 0 and float(high).is_integer():
        result["maximum"] = inside(result.pop("exclusiveMaximum"), upwards=False)


def _finish_object(schema: dict[str, Any], result: dict[str, Any], path: Path) -> None:
    """Drop a number of properties that always holds, and refuse one that repeated keys could feign."""
    least = result.get("minProperties")
    if least is None:
        return
    required = len(result.get("required", ()))
    if least <= required:
        del result["minProperties"]
    elif least > required + 1 and result.get("additionalProperties") is not False:
        del result["minProperties"]
        raise unsupported((*path, "minProperties"), f"more than {required + 1} properties cannot be required by number")
