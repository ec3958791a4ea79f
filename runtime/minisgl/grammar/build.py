"""Grammars of constraints: from `StructuredOutput` to the text of `Submit.grammar`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.ebnf import to_lark
from minisgl.grammar.lark import Fragment
from minisgl.grammar.structural_tag import structural_tag
from minisgl.wire.text import StructuredOutput

_NO_TOKENS: Final[Mapping[str, int]] = MappingProxyType({})


def build(constraint: StructuredOutput, added_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """Return the text of the grammar of answers under a constraint. `added_tokens`: ids by text, of tokens that a
    structural tag may begin or end with. Raises GrammarError."""
    part = fragment(constraint, added_tokens=added_tokens)
    return lark.grammar(f"start: {part.expression}", part)


def fragment(
    constraint: StructuredOutput, name: str = "constraint", added_tokens: Mapping[str, int] = _NO_TOKENS
) -> Fragment:
    """Return a constraint as part of a larger grammar, in which `name` is unique. Raises GrammarError."""
    match constraint.kind:
        case "json":
            return Fragment(lark.json_schema(decode_schema(constraint.value), compact=constraint.compact))
        case "regex":
            return Fragment(lark.regex(constraint.value))
        case "choice":
            return Fragment(lark.one_of([lark.literal(text) for text in _decode(constraint.value)]))
        case "grammar":
            return Fragment(f"@{name}", ((name, to_lark(constraint.value)),))
        case "structural_tag":
            return structural_tag(constraint.value, name, added_tokens)


def decode_schema(text: str) -> dict[str, Any] | bool:
    """Return a decoded JSON schema. Raises GrammarError."""
    schema = _decode(text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("unsupported_schema", "a JSON schema is an object, true or false")
    return schema


def _decode(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError("invalid_grammar", f"the constraint is not valid JSON: {error}") from None
