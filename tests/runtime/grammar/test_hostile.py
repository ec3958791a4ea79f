"""Constraints that were made to cost time, memory or stack: all are refused or compiled within a second."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar.build import build
from minisgl.grammar.validate import validate
from minisgl.wire.text import ConstraintKind, StructuredOutput
from support.grammar.walk import grammars

SECONDS = 3 * 1.0
"""CPU time, with three times the limit."""

TEXT = {"type": "string"}
LISTS = {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000, "items": TEXT}}


def nested(schema: Any, depth: int, **keyword: Any) -> Any:
    for _ in range(depth):
        schema = {key: [schema] if value is list else schema for key, value in keyword.items()}
    return schema


def chain(length: int, link: Any) -> Any:
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": TEXT}}


def exponential_one_of(depth: int, ways: int, *, disjoint: bool) -> Any:
    schema: Any = TEXT
    for i in range(depth):
        names = [f"{i}_{j}" for j in range(ways)]
        tagged = {"required": ["k"]} if disjoint else {}
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, f"v{name}": schema}, **tagged} for name in names
            ]
        }
    return schema


def two_ways(next: Any) -> Any:
    return {"oneOf": [{"anyOf": [next] * 40}, {"anyOf": [next] * 40}]}


REFUSED: dict[str, tuple[ConstraintKind, Any]] = {
    "depth": ("json", nested({}, 500, items=dict)),
    "depth in anyOf": ("json", nested({}, 300, anyOf=list)),
    "long chain of references": ("json", chain(20_000, lambda next: {"type": "object", "properties": {"a": next}})),
    "long chain of references alone": ("json", chain(20_000, lambda next: next)),
    "circle of references": (
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    "pattern of 1 MB": ("json", {"type": "string", "pattern": "(a|b)" * 200_000}),
    "regex of 1 MB": ("regex", "ab" * 500_000),
    "overlapping oneOf": ("json", exponential_one_of(7, 3, disjoint=False)),
    "deep oneOf": ("json", exponential_one_of(12, 2, disjoint=True)),
    "references that multiply in oneOf": ("json", chain(12, two_ways)),
    "allOf of anyOf": (
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": TEXT}} for j in range(5)]} for i in range(10)]},
    ),
    "many properties": ("json", {"properties": {f"p{i}": TEXT for i in range(50_000)}}),
    "many schemas": (
        "json",
        {"anyOf": [{"type": "object", "properties": {"a": {}, f"p{i}": {}}} for i in range(9_000)]},
    ),
    "long enum": ("json", {"enum": [f"value {i}" for i in range(100_000)]}),
    "large schema": ("json", {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 500]} for i in range(900)}}),
    "many patterns": ("json", {"patternProperties": {f"^a{i}.*b{i}$": TEXT for i in range(100)}}),
    "least length": ("json", {"type": "string", "minLength": 10**9}),
    "large divisor": ("json", {"type": "integer", "multipleOf": 9_999_991}),
    "deep constant": ("json", {"const": nested(1, 900, a=dict)}),
    "terminals that double": (
        "grammar",
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"',
    ),
    "deep parentheses": ("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep parentheses in EBNF": ("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "grammar of 1 MB": ("grammar", "start: " + '"a" ' * 250_000),
    "rule of itself": ("grammar", "start: a\na: a"),
    "many optional texts": ("grammar", "start: " + '"a"? ' * 20_000),
    "many optional texts in EBNF": ("grammar", "root ::= " + '"a"?' * 25_000),
    "many symbols that may be empty": ("grammar", "start: " + "x " * 60_000 + '\nx: "a"?'),
    "many optional calls of itself": ("grammar", "start: " + "start? " * 18_000 + '"a"'),
    "many rules that may be empty": (
        "grammar",
        "start: " + "r " * 1000 + "\n" + "\n".join(f"r{i}: " + "x* " * 1000 for i in range(30)) + '\nr: "a"?\nx: "b"?',
    ),
    "long choices": ("choice", ["x" * 1000] * 1000),
}
ALLOWED: dict[str, tuple[ConstraintKind, Any]] = {
    "chain of references": ("json", chain(300, lambda next: {"type": "object", "properties": {"a": next}})),
    "deep oneOf": ("json", exponential_one_of(6, 3, disjoint=True)),
    "long enums in oneOf": ("json", {"oneOf": [{"enum": [f"{a}{i}" for i in range(4000)]} for a in "ab"]}),
    "long lists": ("json", {"type": "array", "items": LISTS, "maxItems": 10**9, "minItems": 9999}),
    "counts in counts": ("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
    "many states": ("regex", "(.|x)*a(.|b){100}z"),
    "long chain of rules": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"',
    ),
    "long chain of terminals": (
        "grammar",
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(8000)) + '\nR8000: "a"',
    ),
    "many optional texts": ("grammar", "start: " + '"a"? ' * 9_000),
    "many words": ("grammar", "start: (" + " | ".join(f'"word{i}"' for i in range(9_000)) + ")+"),
    "many rules": ("grammar", "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}?' for i in range(5000)) + '\nr5000: "a"'),
    "repeated optional texts": ("grammar", 'start: ("a"? "b"?){20000}'),
    "ambiguous rules": ("grammar", 'start: s\ns: s s | "a" | ""'),
}


def constraint(case: tuple[ConstraintKind, Any]) -> StructuredOutput:
    kind, value = case
    return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_constraint_is_refused_within_a_second(name: str) -> None:
    hostile = constraint(REFUSED[name])
    start = time.process_time()
    with pytest.raises(GrammarError) as error:
        validate(hostile)
    assert time.process_time() - start < SECONDS
    assert error.value.code in ("grammar_too_complex", "unsupported_schema", "invalid_grammar")
    assert len(error.value.message) < 1000
    assert hostile.kind != "json" or error.value.path.startswith("#")


@pytest.mark.parametrize("name", ALLOWED)
def test_a_costly_constraint_is_compiled_within_a_second(name: str) -> None:
    costly = constraint(ALLOWED[name])
    grammars()
    start = time.process_time()
    validate(costly)
    assert time.process_time() - start < SECONDS
    start = time.process_time()
    grammars().matcher(build(costly))
    assert time.process_time() - start < SECONDS
