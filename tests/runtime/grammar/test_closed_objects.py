"""Objects whose patterns match no key beside the named ones: their answers end, and are valid."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from minisgl.grammar.arguments import lenient_json, strict_json
from minisgl.grammar.build import build
from minisgl.grammar.lark import grammar
from minisgl.grammar.schema.exact import exact
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.grammar.oracle import problems
from support.grammar.walk import grammars, random_answer

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG = {"type": "boolean"}


def closed(properties: Any, patterns: Any, **keywords: Any) -> Any:
    schema = {"type": "object", "properties": properties, "patternProperties": patterns, "additionalProperties": False}
    return {**schema, **keywords}


ONE = closed({"a": DIGIT}, {"^a$": {"type": "integer"}}, required=["a"])
SCHEMAS = {
    "a pattern of one property": ONE,
    "a pattern of two properties": closed({"a": FLAG, "b": FLAG}, {"^[ab]$": FLAG}, required=["a", "b"]),
    "in items": {"type": "array", "items": ONE, "minItems": 2, "maxItems": 3},
    "in a definition": {"$defs": {"one": ONE}, "type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3},
    "a pattern that matches nothing": closed({"a": FLAG}, {r"[^\s\S]": FLAG}, required=["a"]),
    "a pattern of keys that cannot be written": closed(
        {"a": FLAG}, {"^[^\\b\\t\\n\\f\\r -~\\x80-\U0010ffff]$": FLAG}, required=["a"]
    ),
    "a pattern of a required name": closed({}, {"^a$": DIGIT}, required=["a"]),
    "patterns that limit a property further": closed({"a": {"type": "integer", "minimum": 0}}, {"^a$": {"maximum": 5}}),
    "two patterns": closed({"a": DIGIT, "b": True}, {"^a$": {"minimum": 3}, "^(a|b)$": {"type": "integer"}}),
    "a property that is forbidden": closed({"a": False, "b": FLAG}, {"^a$": FLAG}, required=["b"]),
    "no property": closed({}, {r"[^\s\S]": FLAG}),
    "a name with quotes": closed({'"': FLAG, "\t": FLAG}, {'^["\\t]$': FLAG}, required=['"']),
    "in allOf": {"allOf": [{"type": "object", "properties": {"a": DIGIT}}, closed({}, {"^a$": {}}, required=["a"])]},
}
MERGED = {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}
SCHEMAS |= {
    "a pattern of a property in allOf": {"allOf": [MERGED, closed({}, {"^a$": {"minimum": 3}})]},
    "a pattern beside allOf": {"allOf": [MERGED], "patternProperties": {"^a$": {}}, "additionalProperties": False},
    "a pattern beside a reference": {"$defs": {"m": MERGED}, "$ref": "#/$defs/m", **closed({}, {"^a$": {}})},
}
OPEN = {
    "a pattern of more keys in allOf": {"allOf": [MERGED, closed({"a": True}, {"^(a|b)$": DIGIT})]},
    "a pattern of more keys": closed({"a": DIGIT}, {"^(a|b)$": DIGIT}),
    "additional properties": closed({"a": DIGIT}, {"^a$": {}}, additionalProperties=DIGIT),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_come_to_an_end_and_are_valid(name: str) -> None:
    schema = SCHEMAS[name]
    constraint = StructuredOutput("json", json.dumps(schema))
    validate(constraint)
    matcher = grammars().matcher(build(constraint))
    answers = [random_answer(matcher.copy(), random.Random(seed)) for seed in range(20)]
    assert any(answers)
    for answer in answers:
        assert answer is None or problems(json.dumps(schema), answer) == [], answer


@pytest.mark.parametrize("name", OPEN)
def test_other_keys_stay_possible(name: str) -> None:
    schema = OPEN[name]
    matcher = grammars().matcher(build(StructuredOutput("json", json.dumps(schema))))
    answers = [random_answer(matcher.copy(), random.Random(seed)) for seed in range(60)]
    assert any(answer and set(json.loads(answer)) - {"a"} for answer in answers)
    assert all(answer is None or problems(json.dumps(schema), answer) == [] for answer in answers)


@pytest.mark.parametrize("arguments", [strict_json, lenient_json])
def test_arguments_of_tools_come_to_an_end(arguments: Any) -> None:
    matcher = grammars().matcher(grammar(f"start: {arguments(ONE)}"))
    answers = [random_answer(matcher.copy(), random.Random(seed)) for seed in range(20)]
    assert any(answers) and all(answer is None or problems(json.dumps(ONE), answer) == [] for answer in answers)


@pytest.mark.parametrize("pattern", ["^x{}", "((a{{1,50}}b?){{1,50}}.*{}){{3}}$", "^({}|[^a-z]{{1,500}})$"])
def test_many_objects_with_patterns_are_read_within_a_second(pattern: str) -> None:
    names = {f"name{i}": FLAG for i in range(16)}
    schema = {"anyOf": [closed(names, {pattern.format(f"{i}a{j}"): FLAG for j in range(8)}) for i in range(200)]}
    start = time.process_time()
    exact(schema)
    assert time.process_time() - start < 3
