from __future__ import annotations

from typing import Any

import pytest

from minisgl.parsing.parameter_types import ALL_TYPES, has_type, parameter_types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "unknown"}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
        ({"enum": ["a", 1, 2.5, None, True, [], {}]}, ALL_TYPES),
        ({"const": 1}, {"integer"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"allOf": [{"type": ["number", "object"]}, {"type": ["integer", "object"]}]}, {"integer", "object"}),
        ({"type": ["integer", "null"], "enum": [2.0, None]}, {"integer", "null"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "object"}, {"$ref": "#/$defs/a~1b"}]}, {"object", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ALL_TYPES),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "#/$defs/missing/x"}, ALL_TYPES),
        ({"$ref": "https://example.org/schema"}, ALL_TYPES),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    tool = {
        "properties": {"p": schema},
        "$defs": {"a/b": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert parameter_types(tool, "p") == types


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_references_that_multiply_count_as_any_type(keyword: str) -> None:
    again = {keyword: [{"$ref": "#/$defs/again"}] * 1000}
    schema = {"properties": {"a": {"$ref": "#/$defs/again"}, "b": {"type": "integer"}}, "$defs": {"again": again}}
    assert parameter_types(schema, "a") == ALL_TYPES
    assert parameter_types(schema, "b") == {"integer"}


def test_parameters_that_no_schema_lists() -> None:
    assert parameter_types({}, "p") == ALL_TYPES
    assert parameter_types({"additionalProperties": {"type": "string"}}, "p") == {"string"}


def test_integers_are_numbers_and_whole_numbers_are_integers() -> None:
    assert has_type(1, frozenset({"number"}))
    assert has_type(2.0, frozenset({"integer"}))
    assert not has_type(2.5, frozenset({"integer"}))
    assert not has_type(True, frozenset({"integer", "number"}))
