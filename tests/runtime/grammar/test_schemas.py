"""JSON schemas of all kinds: accepted ones are enforced exactly, others are refused with their path."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar.build import build
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.grammar.oracle import problems
from support.grammar.schemas import random_schema
from support.grammar.walk import grammars, next_tokens, random_answer, tokenizer

SECONDS = 3 * 1.0
"""Three times the limit for checking, compiling or refusing a schema."""


def refused(schema: Any) -> GrammarError:
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput("json", json.dumps(schema)))
    return error.value


def allows(schema: Any, answer: str) -> bool:
    """Whether an accepted schema allows an answer."""
    constraint = StructuredOutput("json", json.dumps(schema))
    validate(constraint)
    matcher = grammars().matcher(build(constraint))
    return matcher.replay(tokenizer().encode(answer, add_special_tokens=False).ids) and matcher.can_end


@pytest.mark.parametrize("part", range(10))
def test_answers_under_generated_schemas_are_valid_and_refusals_name_a_path(part: int) -> None:
    grammars()
    accepted = answers = 0
    for seed in range(part * 100, part * 100 + 100):
        rng = random.Random(seed)
        text = json.dumps(random_schema(rng))
        constraint = StructuredOutput("json", text)
        start = time.perf_counter()
        try:
            validate(constraint)
            matcher = grammars().matcher(build(constraint))
        except GrammarError as error:
            assert error.code in ("unsupported_schema", "grammar_too_complex"), text
            assert error.path.startswith("#") and error.message.startswith(f"{error.path}: "), (text, error.message)
            continue
        finally:
            assert time.perf_counter() - start < SECONDS, text
        accepted += 1
        for _ in range(4):
            answer = random_answer(matcher.copy(), rng)
            if answer is not None:
                answers += 1
                assert not problems(text, answer), (seed, text, answer)
    assert accepted > 50 and answers > 200


@pytest.mark.parametrize(
    ("schema", "path", "text"),
    [
        ({"not": {"type": "string"}}, "#/not", "'not'"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a/not", "'not'"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems", "'uniqueItems'"),
        ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, "#/$defs/x/contains", "'contains'"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "#/anyOf/1/if", "'if'"),
        ({"dependentRequired": {"a": ["b"]}}, "#/dependentRequired", "'dependentRequired'"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "#/unevaluatedProperties", "'unevaluatedProperties'"),
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern", "looks around"),
        ({"patternProperties": {"a/(?!b)": {}}}, "#/patternProperties/a~1(?!b)", "looks around"),
        ({"type": "string", "format": "regex"}, "#/format", "'regex'"),
        ({"type": "objekt"}, "#/type", "'objekt'"),
        ({"type": []}, "#/type", "at least one type"),
        ({"enum": []}, "#/enum", "1 to"),
        ({"enum": [1, 2**60]}, "#/enum/1", "2**53"),
        ({"enum": [1, 10**400]}, "#/enum/1", "2**53"),
        ({"minimum": 10**400}, "#/minimum", "expected a number"),
        ({"const": {"a\x01": 1}}, "#/const/a\x01", "control"),
        ({"properties": {"\x01": True}}, "#/properties/\x01", "control"),
        ({"properties": []}, "#/properties", "object"),
        ({"patternProperties": []}, "#/patternProperties", "object"),
        ({"required": "a"}, "#/required", "list of texts"),
        ({"minLength": -1}, "#/minLength", "at least 0"),
        ({"minimum": "1"}, "#/minimum", "number"),
        ({"multipleOf": 0}, "#/multipleOf", "above 0"),
        ({"pattern": 5}, "#/pattern", "text"),
        ({"items": 5}, "#/items", "schema"),
        ({"items": [{}]}, "#/items", "prefixItems"),
        ({"anyOf": {}}, "#/anyOf", "list"),
        ({"$ref": "https://example.com/a"}, "#/$ref", "$defs"),
        ({"$ref": "#anchor"}, "#/$ref", "anchor"),
        ({"$ref": "#/$defs/a"}, "#/$ref", "does not exist"),
        ({"$ref": 5}, "#/$ref", "text"),
        ({"$ref": "#"}, "#", "same value"),
        ({"properties": {"a": {"$ref": "#"}}, "type": "object", "required": ["a"]}, "#", "finite"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", "finite"),
        ({"minProperties": 2}, "#/minProperties", "by number"),
        ({"propertyNames": {"anyOf": [{}]}}, "#/propertyNames", "propertyNames"),
        ({"properties": {"a": {}}, "propertyNames": {"enum": ["a"]}}, "#/propertyNames", "without properties"),
        ({"properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}}, "#/properties/a", "oneOf"),
        (
            {"properties": {"a": {"oneOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"type": "null"}]}}},
            "#/properties/a/oneOf/0",
            "oneOf",
        ),
        (
            {"items": {"properties": {"a": {"type": "string"}, "b": {}}, "minProperties": 1, "maxProperties": 1}},
            "#/items",
            "properties",
        ),
        (False, "#", "no value"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path(schema: Any, path: str, text: str) -> None:
    error = refused(schema)
    assert (error.code, text in error.message) == ("unsupported_schema", True), error.message
    assert error.path.startswith(path), error.message


def test_the_path_of_a_schema_that_allows_no_value_is_that_of_the_innermost() -> None:
    schema: dict[str, Any] = {"type": "integer", "minimum": 5, "maximum": 4}
    schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    schema = {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "$defs": {"part": schema}}
    error = refused(schema)
    assert error.path == "#/$defs/part/properties/x"
    assert "minimum (5) is greater than maximum (4)" in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False, "not": False, "dependentRequired": {}, "unevaluatedItems": True, "if": {}},
        {"type": "array", "maxItems": 1, "uniqueItems": True},
        {"unevaluatedProperties": {}, "additionalProperties": False},
        {"title": "a", "description": "b", "default": 1, "examples": [], "deprecated": True, "x-order": [1]},
        {"minProperties": 0, "type": "object"},
        {"propertyNames": {"type": "string"}, "properties": {"a": {}}},
        {"type": "integer", "format": "int32"},
        {"$id": "https://e.com/a", "properties": {"a": {"$ref": "https://e.com/a#/$defs/b"}}, "$defs": {"b": {}}},
        {"$defs": {"unused": {"not": {}}}},
    ],
)
def test_keywords_without_effect_are_accepted(schema: Any) -> None:
    validate(StructuredOutput("json", json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2024-12-31T23:59:59.5+01:00"', '"2024-12-31T24:00:00Z"'),
        ({"type": "string", "format": "date", "pattern": "^2024"}, '"2024-01-31"', '"2023-01-31"'),
        ({"type": "string", "format": "color"}, '"red"', "1"),
        ({"type": "string", "pattern": "a.c"}, '"xabcx"', '"ac"'),
        ({"type": "string", "pattern": "^[[a&&b]+$"}, '"a[&b"', '"c"'),
        ({"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": {"type": "null"}}}, "null", "1"),
        ({"exclusiveMinimum": 1, "maximum": 1.5, "type": "number"}, "1.25", "1"),
        ({"minimum": 1.5, "exclusiveMaximum": 2, "type": "number"}, "1.99", "2"),
        ({"minimum": -1.5, "exclusiveMaximum": -1, "type": "number"}, "-1.25", "-1"),
        ({"type": "integer", "maximum": 9223372036854775807}, "9000000000000000000", "9223372036854775808"),
        ({"type": "integer", "minimum": -9223372036854775808}, "-9000000000000000000", "-9223372036854775809"),
        ({"multipleOf": 0.01, "type": "number"}, "19.99", "19.999"),
        ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"oneOf": [False, {"type": "integer"}]}, "1", '"a"'),
        ({"oneOf": [{"const": [1]}, {"const": [2]}, {"const": {"a": 1}}], "type": "object"}, '{"a":1}', "[1]"),
        (
            {"oneOf": [{"allOf": [{"type": "string"}]}, {"allOf": [{"type": "integer"}]}], "allOf": [False, True][1:]},
            "1",
            "[]",
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "properties": {"a": {"type": "integer", "minimum": 1, "exclusiveMinimum": False, "required": True}},
                "type": "object",
            },
            '{"a": 1}',
            '{"a": 0}',
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^a": {"type": "integer"}},
                "additionalProperties": False,
                "unevaluatedProperties": False,
            },
            '{"ab": 1}',
            '{"b": 1}',
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "patternProperties": {"^k": {"const": 1}}, "required": ["k"]},
                    {"type": "array"},
                ]
            },
            '{"k": 1}',
            '{"k": 2}',
        ),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, '{"b":1}', '{"c":1}'),
        ({"propertyNames": {"pattern": "^x"}, "type": "object"}, '{"xy":1}', '{"y":1}'),
        ({"propertyNames": {"maxLength": 2}, "type": "object"}, '{"xy":1}', '{"xyz":1}'),
        ({"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False, "type": "object"}, "{}", '{"b":1}'),
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"},
            '{"a": 1, "b": "x"}',
            '{"\\u0061": "x"}',
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": [{"type": "integer"}],
                "additionalItems": False,
            },
            "[1]",
            "[1, 2]",
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "integer",
                "minimum": 3,
                "exclusiveMinimum": True,
            },
            "4",
            "3",
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": {"$ref": "#/definitions/digit", "minimum": 100, "format": "regex"},
                "definitions": {"digit": {"type": "integer", "maximum": 9}},
            },
            "[7]",
            "[100]",
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-06/schema#",
                "$ref": "#/definitions/digit",
                "definitions": {"digit": {"type": "integer", "maximum": 9}},
                "not": {},
            },
            "7",
            "100",
        ),
        (
            {
                "$schema": "https://json-schema.org/draft/2019-09/schema",
                "items": {"$ref": "#/$defs/digit", "minimum": 5},
                "type": "array",
                "$defs": {"digit": {"type": "integer", "maximum": 9}},
            },
            "[7]",
            "[3]",
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
                    for kind in ("cat", "dog")
                },
            },
            '{"kind": "dog"}',
            '{"kind": "cow"}',
        ),
        (
            {"oneOf": [{"enum": [1, "a"]}, {"enum": [2, "b"]}, {"type": "null"}], "anyOf": [{"type": "integer"}]},
            "2",
            '"a"',
        ),
        (
            {
                "$defs": {"l": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/l"}}]}},
                "$ref": "#/$defs/l",
            },
            "[[null], []]",
            "[1]",
        ),
    ],
)
def test_a_schema_allows_what_is_valid_and_nothing_else(schema: Any, good: str, bad: str) -> None:
    assert allows(schema, good)
    assert not allows(schema, bad)
    assert not problems(json.dumps(schema), good)


def test_whitespace_is_flexible_but_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    indented = (json.dumps({"a": [1, 2]}, indent=4), json.dumps({"a": []}, indent="\t"))
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', *indented):
        assert allows(schema, text)
    for text in ('{"a":[1,    2]}', '{"a":\n\n[1]}', ' {"a":[1]}', '{"a":[1]}\n'):
        assert not allows(schema, text)
    compact = grammars().matcher(build(StructuredOutput("json", json.dumps(schema), compact=True)))
    assert compact.replay(tokenizer().encode('{"a":', add_special_tokens=False).ids)
    assert tokenizer().token_to_id("Ġ") not in next_tokens(compact)
