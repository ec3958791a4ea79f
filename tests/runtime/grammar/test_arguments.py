"""Arguments of tools, whether or not their schemas can be enforced exactly."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.arguments import lenient_json, strict_json
from support.grammar.walk import grammars, tokenizer


def allows(expression: str, answer: str) -> bool:
    matcher = grammars().matcher(lark.grammar(f"start: {expression}"))
    return matcher.replay(tokenizer().encode(answer, add_special_tokens=False).ids) and matcher.can_end


def test_a_schema_that_can_be_enforced_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    assert lenient_json(schema) == lark.json_schema(schema)


@pytest.mark.parametrize(
    ("extra", "answer"),
    [
        ({"not": {"required": ["x"]}}, '{"a": 1}'),
        ({"dependentRequired": {"a": ["b"]}, "contains": {}}, '{"a": 1}'),
        ({"$defs": {"x": {"uniqueItems": True}}}, '{"a": 1}'),
    ],
)
def test_keywords_that_are_not_supported_are_left_out(extra: dict[str, Any], answer: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False, **extra}
    assert allows(lenient_json(schema), answer)
    assert not allows(lenient_json(schema), '{"a": "x"}')
    assert not allows(lenient_json(schema), '{"b": 1}')


def test_branches_of_one_of_that_overlap_are_alternatives() -> None:
    schema = {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 4}]}
    assert allows(lenient_json(schema), "3.5") and not allows(lenient_json(schema), '"a"')


def test_a_schema_that_makes_no_sense_allows_any_object() -> None:
    for schema in ({"type": "object", "$ref": "#"}, {"type": "object", "required": ["a"], "maxProperties": 0}):
        assert allows(lenient_json(schema), '{"a": [1]}')
        assert not allows(lenient_json(schema), "1")
    assert allows(lenient_json({"$ref": "#"}), "1")
    assert allows(lenient_json(False), "null")


def test_expressions_of_strict_tools_are_kept_and_their_errors_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent sends its tools with each request."""
    schema: dict[str, Any] = {"type": "object", "properties": {"kept": {"type": "integer"}}}
    expression = strict_json(schema)
    assert expression == lark.json_schema(schema)
    refused = {"type": "object", "properties": {"a": {"not": {}}}}
    for _ in range(2):
        with pytest.raises(GrammarError, match="not"):
            strict_json(refused)
        assert lenient_json(refused)
    monkeypatch.setattr(lark, "json_schema", None)
    assert strict_json({**schema}) is expression
