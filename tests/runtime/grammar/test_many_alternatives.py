"""Grammars with many ways to go on at one place, up to the numbers that the API accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.build import build
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.library import matching
from minisgl.grammar.tokenizer import GrammarTokenizer
from minisgl.grammar.validate import validate
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.call_text import call_text
from minisgl.parsing.reasoning import ReasoningState
from minisgl.wire.text import StructuredOutput
from support.parsing.replay import formats
from support.tiny_tokenizers import byte_fallback, write_directory

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


def arrays(count: int) -> list[Any]:
    return [{"type": "array", "items": {"const": number}} for number in range(count)]


def told_apart(count: int, first: dict[str, Any]) -> dict[str, Any]:
    """Return alternatives of 30 optional properties behind a required one, which is the first."""

    def alternative(number: int) -> dict[str, Any]:
        properties = {name.format(number): schema for name, schema in first.items()} | optional(30)["properties"]
        kind, value = next(iter(properties.items()))
        properties[kind] = {"const": number} if value == "number" else value
        return {"type": "object", "properties": properties, "required": [kind], "additionalProperties": False}

    return {"anyOf": [alternative(number) for number in range(count)]}


def behind_references(objects: int, optional_each: int, references: int) -> dict[str, Any]:
    """Return alternatives that are objects, each at the end of a chain of references that is read from its end."""
    definitions: dict[str, Any] = {}
    for number in range(objects):
        definitions[f"d{number}-0"] = optional(optional_each)
        for link in range(1, references):
            definitions[f"d{number}-{link}"] = {"anyOf": [{"$ref": f"#/$defs/d{number}-{link - 1}"}, {"type": "null"}]}
    ends = [{"$ref": f"#/$defs/d{number}-{references - 1}"} for number in range(objects)]
    return {"anyOf": ends, "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        behind_references(3, 800, references=12),
        within({"anyOf": [within(optional(1000)) for _ in range(4)]}),
        {"anyOf": arrays(1000)},
        {"allOf": [optional(1000), {"type": "object"}]},
        told_apart(200, {"kind": "number"}),
        told_apart(200, {"kind{}": True}),
        {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/wide"}, "maxItems": n} for n in range(400)],
            "$defs": {"wide": optional(1000)},
        },
        {"$defs": {"node": optional(900) | {"properties": {"n": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    ],
)
def test_as_many_as_a_mask_can_have_in_time_are_taken(schema: dict[str, Any]) -> None:
    validate(StructuredOutput("json", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        within({"anyOf": [within(optional(801)) for _ in range(5)]}),
        {"anyOf": arrays(1001)},
        {"anyOf": [within({"allOf": [optional(900)]}), *[within(optional(900))] * 3, within({"$ref": "#/$defs/wide"})]}
        | {"$defs": {"wide": optional(900)}},
        told_apart(200, {"kind": True}),
        behind_references(7, 800, references=12),
    ],
)
def test_more_are_refused_before_anything_is_queued(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="more than 4000 optional properties") as caught:
        validate(StructuredOutput("json", json.dumps(schema)))
    assert caught.value.code == "grammar_too_complex"


def test_a_grammar_has_at_most_10000_alternatives() -> None:
    for count in (10_000, 10_002):
        alternatives = " | ".join(f'"{number:x}"' for number in range(count))
        constraint = StructuredOutput("grammar", f'root ::= "a: " ({alternatives})')
        if count <= 10_000:
            validate(constraint)
        else:
            with pytest.raises(GrammarError, match="more than 10000 alternatives"):
                validate(constraint)


def test_a_mask_is_computed_for_many_tokens_that_end_before_many_properties(tmp_path: Path) -> None:
    """Each token that completes what is before the properties counts all of them again."""
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["{" + "\n" * breaks + " " * blanks + '"' for breaks in (0, 1) for blanks in range(1, 30)])
    vocabulary = GrammarTokenizer(
        write_directory(tmp_path, tokenizer), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[2]
    )
    constraint = StructuredOutput("json", json.dumps(optional(1000)))
    assert GrammarCompiler(vocabulary).compile(build(constraint)).error() is None


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"])
def test_required_calls_have_1000_optional_properties_within_others(parser: str) -> None:
    answers = formats(parser)
    tools = [CallableTool("f", within(optional(1000)) | {"required": []}, is_strict=True)]
    text = answer_grammar(answers, ReasoningState.BEHIND, tools=tools, must_call=True)
    calls = [call_text(answers, [("f", {"a": {name: "x"}})]) for name in ("p999", "p1000")]
    assert matching(text, calls) == [True, False]
