"""Grammars of constraints: from `StructuredOutput` to the text of `Submit.grammar`."""

from __future__ import annotations

from typing import Any

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from minisgl.grammar import lark
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.lark import Fragment
from minisgl.wire.text import StructuredOutput


def build(constraint: StructuredOutput) -> str:
    """Return the text of the grammar of answers under a constraint. Raises GrammarError."""
    part = fragment(constraint)
    return lark.grammar(f"start: {part.expression}", part)


def fragment(constraint: StructuredOutput, name: str = "constraint") -> Fragment:
    """Return a constraint as part of a larger grammar, in which `name` is unique. Raises GrammarError."""
    match constraint.kind:
        case "json":
            return Fragment(lark.json_schema(_decode(constraint.value)))
        case "regex":
            return Fragment(lark.regex(constraint.value))
        case "choice":
            return Fragment(lark.one_of([lark.literal(text) for text in _decode(constraint.value)]))
        case "grammar":
            return Fragment(f"@{name}", ((name, _lark(constraint.value)),))
        case "structural_tag":
            raise GrammarError("invalid_grammar", "structural tags are not supported yet")


def _decode(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError("invalid_grammar", f"the constraint is not valid JSON: {error}") from None


def _lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:  # the library raises plain Exception
        raise GrammarError("invalid_grammar", f"the grammar cannot be read as EBNF: {error}") from None
