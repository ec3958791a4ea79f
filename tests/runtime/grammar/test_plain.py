"""Schemas that the library is not asked about."""

from __future__ import annotations

import random

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.library import problem_of
from minisgl.grammar.schema.exact import exact
from minisgl.grammar.schema.plain import is_plain
from support.grammar.schemas import random_schema


def test_the_library_accepts_schemas_that_count_as_plain() -> None:
    plain = 0
    for seed in range(2000):
        try:
            schema = exact(random_schema(random.Random(seed))).schema
        except GrammarError:
            continue
        if is_plain(schema):
            plain += 1
            assert not problem_of(lark.grammar(f"start: {lark.exact_json(schema)}")), schema
    assert plain > 500


def test_schemas_that_may_contradict_themselves_are_not_plain() -> None:
    for schema in (
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 0.5, "maximum": 0.6},
        {"type": "number", "minimum": 1e19},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "string", "enum": [1]},
        {"type": "string", "const": "a", "maxLength": 0},
        {"enum": ["a"], "const": "b"},
        {"type": "string", "format": "uuid", "maxLength": 3},
        {"type": "string", "pattern": "^a$"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        False,
    ):
        assert not is_plain(exact(schema).schema), schema
    wide = {
        "type": "object",
        "properties": {f"a{i}": {"type": "string"} for i in range(900)},
        "items": {"enum": [f"{i}" for i in range(2000)]},
    }
    assert not is_plain(exact(wide).schema)
    assert is_plain(True)
