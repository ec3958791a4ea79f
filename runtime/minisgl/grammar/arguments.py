"""Arguments of tool calls: exactly those that a schema allows, or as far as that can be enforced. Agents send the same
tools with each request, so their expressions are kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.library import problem_of
from minisgl.grammar.schema.exact import exact, lenient
from minisgl.grammar.schema.plain import is_plain
from minisgl.grammar.schema.reader import Schema

_LARGE_BYTES: Final = 16 << 10
_KEPT: Final = 2048
_KEPT_LARGE: Final = 128
"""Schemas of tools, whose expressions are kept: at most some 64 MiB of small ones and as much of large ones."""


def lenient_json(schema: Schema) -> str:
    """Return an expression for JSON under the schema as far as that can be enforced: all of it, or without keywords
    that are not supported, or else any JSON. Never raises."""
    return _kept(schema, is_exact=False)


def strict_json(schema: Schema) -> str:
    """Return an expression for JSON that is valid under the schema. Raises GrammarError."""
    return _kept(schema, is_exact=True)


def _kept(schema: Schema, *, is_exact: bool) -> str:
    text = msgspec.json.encode(schema)
    return (_small if len(text) < _LARGE_BYTES else _large)(text, is_exact)


def _expression(text: bytes, is_exact: bool) -> str:
    schema: Schema = msgspec.json.decode(text, type=dict[str, object] | bool)
    if is_exact:
        return lark.json_schema(schema)
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


_small: Final = lru_cache(_KEPT)(_expression)
_large: Final = lru_cache(_KEPT_LARGE)(_expression)
