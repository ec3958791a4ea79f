"""Check of constraints without a tokenizer, before anything is queued."""

from __future__ import annotations

from llguidance import LLMatcher

from minisgl.grammar.build import build
from minisgl.grammar.errors import GrammarError
from minisgl.wire.text import StructuredOutput


def validate(constraint: StructuredOutput) -> None:
    """Raises GrammarError for a constraint that no engine could apply."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(build(constraint))
    if is_error:
        raise GrammarError("unsupported_schema" if constraint.kind == "json" else "invalid_grammar", messages[0])
