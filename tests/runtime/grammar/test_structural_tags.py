"""Structural tags in both forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from minisgl.errors import GrammarError
from minisgl.grammar.build import build
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.tiny_tokenizers import byte_level

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
JSON_TAG = {
    "begin": "<tool_call>\n",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "\n</tool_call>",
}
CALL = '<tool_call>\n{"a": 1}\n</tool_call>'


def tag(format: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


def triggered(**options: bool) -> dict[str, Any]:
    return tag({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [JSON_TAG], **options})


def separated(**options: bool) -> dict[str, Any]:
    tags = [{"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "]"}]
    return tag({"type": "tags_with_separator", "tags": tags, "separator": ", ", **options})


@pytest.fixture(scope="module")
def tools() -> tuple[Any, LLTokenizer, dict[str, int]]:
    tokenizer = byte_level()
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    )
    added = {text: tokenizer.token_to_id(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")}
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|im_end|>")), added


def allows(tools: Any, definition: dict[str, Any], text: str, *, with_tokens: bool) -> bool:
    """Whether an answer is allowed, written with added tokens, or as plain text."""
    tokenizer, vocabulary, added = tools
    constraint = StructuredOutput("structural_tag", json.dumps(definition))
    validate(constraint)
    matcher = LLMatcher(vocabulary, build(constraint, added), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    # A single character never spells an added token.
    pieces = [text] if with_tokens else list(text)
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (
            OLD,
            ["", "hello", 'hi <f=x>{"a": 1}</f> bye <f=y>3</f>', "<f=y>3</f><f=y>4</f>", "x <f y"],
            ["<f=x>{}</f>", "<f=z>", "<f=y>3"],
        ),
        (triggered(), ["", "text", f"text {CALL} more {CALL}", CALL], ["<tool_call>x", f"{CALL} <tool_call>"]),
        (triggered(at_least_one=True), [CALL, f"{CALL} text {CALL}"], ["", "text", f"text {CALL}"]),
        (triggered(stop_after_first=True), ["", f"text {CALL}", CALL], [f"{CALL} text"]),
        (triggered(at_least_one=True, stop_after_first=True), [CALL], ["", f"{CALL}{CALL}", f"text {CALL}"]),
        (separated(), ["", "[1]", "[1], [2]"], ["[1],[2]", "[x]", "[1], "]),
        (separated(at_least_one=True, stop_after_first=True), ["[1]"], ["", "[1], [2]"]),
        (tag({"type": "const_string", "value": "yes"}), ["yes"], ["no", ""]),
        (tag({"type": "json_schema", "json_schema": SCHEMA}), ['{"a": 5}'], ["{}"]),
        (tag({"type": "grammar", "grammar": 'root ::= "a" [0-9]'}), ["a1"], ["a"]),
        (tag({"type": "any_text", "excludes": ["bad"]}), ["", "good ba"], ["a bad one"]),
        (
            tag({"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}),
            ["<think>a b</think>", "<think></think>"],
            ["<think>a", "<think>a</think>b", "<think>a</think></think>"],
        ),
        (
            tag(
                {"type": "tag", "begin": "(", "content": {"type": "any_text", "excluded_str": ["x"]}, "end": [")", "!"]}
            ),
            ["(a)", "(a!"],
            ["(x)", "(a"],
        ),
        (
            tag(
                {
                    "type": "sequence",
                    "elements": [
                        {
                            "type": "or",
                            "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b+"}],
                        },
                        {"type": "optional", "content": {"type": "const_string", "value": "-"}},
                        {"type": "plus", "content": {"type": "const_string", "value": "x"}},
                        {"type": "star", "content": {"type": "const_string", "value": "y"}},
                        {"type": "repeat", "content": {"type": "const_string", "value": "z"}, "min": 1, "max": 2},
                    ],
                }
            ),
            ["axz", "bb-xxyyzz"],
            ["az", "axzzz", "axy"],
        ),
    ],
)
def test_a_definition_allows_what_it_describes(tools: Any, definition: Any, good: list[str], bad: list[str]) -> None:
    for with_tokens in (True, False):
        for text in good:
            assert allows(tools, definition, text, with_tokens=with_tokens), text
        for text in bad:
            assert not allows(tools, definition, text, with_tokens=with_tokens), text


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        ({}, "`format`"),
        ({"structures": [{"begin": "a", "end": "b"}]}, "`triggers`"),
        ({"format": {"type": "nonsense"}}, "nonsense"),
        ({"format": {"type": "const_string"}}, "value"),
        ({"format": {"type": "any_text", "other": 1}}, "other"),
        ({"format": {"type": "sequence", "elements": []}}, "length"),
        (
            {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]},
            "begins with none of the triggers",
        ),
        ({"format": {"type": "repeat", "content": {"type": "any_text"}, "min": 2, "max": 1}}, "min 2"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "looks around"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "#/not"),
        ({"format": {"type": "grammar", "grammar": "root ::= missing"}}, "missing"),
    ],
)
def test_a_definition_that_cannot_be_applied_is_refused(definition: Any, text: str) -> None:
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput("structural_tag", json.dumps(definition)))
    assert text in error.value.message


def test_a_definition_that_is_nested_too_deeply_is_refused() -> None:
    format: dict[str, Any] = {"type": "any_text"}
    for _ in range(20):
        format = {"type": "optional", "content": format}
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput("structural_tag", json.dumps({"format": format})))
    assert error.value.code == "grammar_too_complex"
