"""Grammars with many ways to go on at one place, up to the numbers that the API accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.grammar import lark
from minisgl.grammar.build import build
from minisgl.grammar.library import matching
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput

TEXTS = [f"choice number {number}" for number in range(4096)]


def optional(count: int) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "string"} for number in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def within(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


def test_an_answer_is_one_of_4096_choices() -> None:
    constraint = StructuredOutput("choice", json.dumps(TEXTS))
    validate(constraint)
    assert matching(build(constraint), [TEXTS[0], TEXTS[4095], "choice number 4096"]) == [True, True, False]


def test_a_grammar_has_4096_alternatives_behind_a_text() -> None:
    alternatives = " | ".join(f'"{text}"' for text in TEXTS)
    constraint = StructuredOutput("grammar", f'root ::= "a: " ({alternatives})')
    validate(constraint)
    assert matching(build(constraint), [f"a: {TEXTS[4095]}", "a: x"]) == [True, False]


@pytest.mark.parametrize("is_nested", [False, True])
def test_an_object_has_1000_optional_properties(is_nested: bool) -> None:
    schema = within(optional(1000)) if is_nested else optional(1000)
    constraint = StructuredOutput("json", json.dumps(schema))
    validate(constraint)
    values: list[Any] = [{}, {"p0": "x"}, {"p7": "x", "p999": "y"}, {"p999": "y", "p7": "x"}]
    texts = [json.dumps({"a": value} if is_nested else value) for value in values]
    assert matching(build(constraint), texts) == [True, True, True, False]


def test_a_union_has_20_objects_of_30_optional_properties() -> None:
    union = {"anyOf": [within(optional(30) | {"title": str(number)}) for number in range(20)]}
    expression = lark.json_schema(within(union))
    texts = ['{"a": {"a": {"p29": "x"}}}', '{"a": {"a": {"p30": "x"}}}']
    assert matching(lark.grammar(f"start: {expression}"), texts) == [True, False]
