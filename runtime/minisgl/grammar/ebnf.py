"""Context-free grammars of users: llguidance's Lark, or EBNF with a rule `root`, as in GBNF."""

from __future__ import annotations

import re
from typing import Final

from llguidance.gbnf_to_lark import any_to_lark

from minisgl.errors import GrammarError

_MAX_SEQUENCES: Final = 10_000
"""Symbols of a grammar that follow others. If all of them are optional, the parser visits each of them in its first
step, in time that grows with their square: half a second for so many."""

_MAX_ALTERNATIVES: Final = 10_000
"""Alternatives of a grammar, all of which may be those of one place: so many take 0.8 s to check."""

_TOKEN: Final = re.compile(
    r'(?P<symbol>"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|@?[A-Za-z_]\w*|<[^<>\s]+>)'
    r"(?P<head>(?:\[[^\]\n]*\])?[ \t]*:)?"
    r"|//[^\n]*|#[^\n]*|\|"
)


def to_lark(text: str) -> str:
    """Return a grammar as Lark. Raises GrammarError."""
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise GrammarError("grammar_too_complex", "the grammar is nested too deeply") from None
    except Exception as error:  # the library raises plain Exception
        raise GrammarError("invalid_grammar", f"the grammar cannot be read as EBNF: {error}") from None
    sequences, alternatives = _sequences(lark)
    if alternatives > _MAX_ALTERNATIVES:
        raise GrammarError("grammar_too_complex", f"the grammar has more than {_MAX_ALTERNATIVES} alternatives")
    if sequences > _MAX_SEQUENCES:
        raise GrammarError(
            "grammar_too_complex",
            f"the grammar has more than {_MAX_SEQUENCES} symbols in sequences; use repetitions such as a{{1,100}}",
        )
    return lark


def _sequences(lark: str) -> tuple[int, int]:
    """Return the numbers of symbols but for the first one of each alternative, and of alternatives behind others."""
    count = alternatives = 0
    for token in _TOKEN.finditer(lark):
        if token["head"]:
            count -= 1
        elif token["symbol"]:
            count += 1
        elif token[0] == "|":
            count -= 1
            alternatives += 1
    return count, alternatives
