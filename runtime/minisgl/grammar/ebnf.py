"""Context-free grammars of users: llguidance's Lark, or EBNF with a rule `root`, as in GBNF."""

from __future__ import annotations

from llguidance.gbnf_to_lark import any_to_lark

from minisgl.grammar.errors import GrammarError


def to_lark(text: str) -> str:
    """Return a grammar as Lark. Raises GrammarError."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise GrammarError("grammar_too_complex", "the grammar is nested too deeply") from None
    except Exception as error:  # the library raises plain Exception
        raise GrammarError("invalid_grammar", f"the grammar cannot be read as EBNF: {error}") from None
