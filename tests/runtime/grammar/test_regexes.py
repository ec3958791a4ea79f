"""Regular expressions of requests and schemas."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest

from minisgl.errors import GrammarError
from minisgl.grammar.build import build
from minisgl.grammar.schema.patterns import translate
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.grammar.oracle import problems
from support.grammar.regexes import random_regex
from support.grammar.walk import grammars, random_answer, tokenizer


def allows(pattern: str, text: str) -> bool:
    matcher = grammars().matcher(build(StructuredOutput("regex", pattern)))
    return matcher.replay(tokenizer().encode(text, add_special_tokens=False).ids) and matcher.can_end


def test_answers_under_random_expressions_match_them() -> None:
    answers = 0
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        for seed in range(400):
            rng = random.Random(seed)
            pattern = random_regex(rng)
            constraint = StructuredOutput("regex", pattern)
            validate(constraint)
            matcher = grammars().matcher(build(constraint))
            for _ in range(4):
                answer = random_answer(matcher.copy(), rng, 100)
                if answer is not None:
                    answers += 1
                    assert re.fullmatch(pattern, answer), (pattern, answer)
    assert answers > 1200


def test_answers_under_random_patterns_of_schemas_are_valid() -> None:
    answers = 0
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        for seed in range(200):
            rng = random.Random(seed)
            pattern = random_regex(rng)
            if rng.random() < 0.7:
                pattern = f"^(?:{pattern})$"
            schema = json.dumps({"type": "string", "pattern": pattern, "maxLength": rng.choice((5, 10, 50))})
            constraint = StructuredOutput("json", schema)
            try:
                validate(constraint)
            except GrammarError as error:
                assert "no value is valid" in error.message or "too complex" in error.message, (schema, error.message)
                continue
            matcher = grammars().matcher(build(constraint))
            for _ in range(4):
                answer = random_answer(matcher.copy(), rng)
                if answer is not None:
                    answers += 1
                    assert not problems(schema, answer), (schema, answer)
    assert answers > 500


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d{3}-\d{4}", "555-1234", "555-12345"),
        ("(?i)yes|no", "YES", "maybe"),
        ("(?s:.)x", "\nx", "x"),
        ("(?P<year>[0-9]{4})", "2024", "24"),
        ("(?<a>a)b", "ab", "a"),
        (r"\Aa\Z", "a", "aa"),
        (r"a\/b", "a/b", "a\\/b"),
        (r"\p{Lu}\P{Lu}", "Éa", "ab"),
        (r"[\p{L}]{2}", "éa", "1a"),
        (r"\cI\x41\u0042\u{43}\0", "\tABC\0", "a"),
        ("a{2", "a{2", "aa"),
        ("a{x}", "a{x}", "a"),
        ("}", "}", "{"),
        (r"[\b]", "\b", "b"),
        ("", "", "a"),
        ("a\nb", "a\nb", "ab"),
    ],
)
def test_an_expression_allows_what_matches_it_as_a_whole(pattern: str, good: str, bad: str) -> None:
    validate(StructuredOutput("regex", pattern))
    assert allows(pattern, good) and not allows(pattern, bad)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?=a)", "looks around"),
        ("(?<!a)b", "looks around"),
        (r"\bword", "word boundary"),
        (r"(a)\1", "back reference"),
        (r"(?P<a>b)\k<a>", "back reference"),
        ("a++", "possessive"),
        ("*a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("(*)", "repeats nothing"),
        ("a{,2}", "{0,"),
        ("(a", "without a `)`"),
        ("a)", "without a `(`"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("[]", "empty"),
        ("[^]]", "empty"),
        ("[[:alpha:]]", "[:alpha:]"),
        (r"[\d-x]", "range"),
        (r"\e", r"`\e`"),
        (r"\x4", "incomplete"),
        (r"\u{}", "incomplete"),
        (r"\ud800", "no character"),
        (r"\p", "incomplete"),
        (r"(?P<a", "does not end"),
        (r"\p{Nonsense}", "Nonsense"),
        ("[b-a]", "b-a"),
    ],
)
def test_an_expression_that_cannot_be_applied_is_refused(pattern: str, text: str) -> None:
    with pytest.raises(GrammarError) as error:
        validate(StructuredOutput("regex", pattern))
    assert error.value.code == "invalid_grammar"
    assert text in error.value.message


def test_flags_are_refused_in_schemas() -> None:
    with pytest.raises(GrammarError) as error:
        translate("(?i)a", of_schema=True)
    assert error.value.code == "unsupported_schema"


@pytest.mark.parametrize(
    "pattern", [r"^x\x01$", r"^x[\x01\x02]$", r"^x[\x01-\x05\v]$", r"^[b-\x01]$", "^x\x7f", r"^x\v$", r"^(a|x\cA)$"]
)
def test_a_pattern_of_a_schema_that_needs_a_character_no_answer_contains_is_refused(pattern: str) -> None:
    for schema, path in (({"pattern": pattern}, "#/pattern"), ({"patternProperties": {pattern: {}}}, "#/pattern")):
        with pytest.raises(GrammarError, match=r"control character|before its beginning") as error:
            validate(StructuredOutput("json", json.dumps(schema)))
        assert error.value.code == "unsupported_schema" and error.value.path.startswith(path)


@pytest.mark.parametrize("pattern", [r"^x[\x01a]$", r"^x[\x00-\x1f]$", r"^x[^\x01]$", r"^x[\x7e-\x7f]$", r"^x\t$"])
def test_a_class_with_other_characters_is_enforced(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    validate(StructuredOutput("json", schema))
    matcher = grammars().matcher(build(StructuredOutput("json", schema)))
    for seed in range(20):
        answer = random_answer(matcher.copy(), random.Random(seed))
        assert answer is not None and problems(schema, answer) == []
