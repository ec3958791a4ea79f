"""Arguments of tool calls that need not be exactly those that a schema allows."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from minisgl.grammar import lark
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.library import problem_of
from minisgl.grammar.schema.exact import exact, lenient
from minisgl.grammar.schema.plain import is_plain
from minisgl.grammar.schema.reader import Schema

_KEPT: Final = 2048
"""Schemas of tools, whose expressions are kept."""


def lenient_json(schema: Schema) -> str:
    """Return an expression for JSON under the schema as far as that can be enforced: all of it, or without keywords
    that are not supported, or else any JSON. Never raises."""
    return _expression(msgspec.json.encode(schema))


@lru_cache(maxsize=_KEPT)
def _expression(text: bytes) -> str:
    schema: Schema = msgspec.json.decode(text, type=dict[str, object] | bool)
    for read in (exact, lenient):
        try:
            result = read(schema).schema
        except GrammarError:
            continue
        expression = lark.exact_json(result)
        if is_plain(result) or not problem_of(lark.grammar(f"start: {expression}")):
            return expression
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return lark.json_schema({"type": "object"} if is_object else True)
