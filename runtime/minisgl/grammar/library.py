"""Checks of grammars by the library, without a tokenizer."""

from __future__ import annotations

import re
from typing import Final

from llguidance import LLMatcher

from minisgl.grammar.limits import LIMITS
from minisgl.grammar.threads import deep_threads

_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def problem_of(grammar: str) -> str:
    """Return the first line of the library's error about the text of a grammar, or an empty text."""
    is_error, messages = deep_threads.submit(LLMatcher.validate_grammar_with_warnings, grammar, limits=LIMITS).result()
    return _POSITION.sub("", messages[0].partition("\n")[0]) if is_error else ""
