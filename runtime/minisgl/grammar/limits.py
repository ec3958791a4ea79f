"""Limits of grammars, with which a compilation takes less than a second."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

from minisgl.wire.text import ConstraintKind

MAX_TEXT: Final[dict[ConstraintKind, int]] = {
    "json": 2 << 20,
    "regex": 8 << 10,
    "choice": 256 << 10,
    "grammar": 128 << 10,
    "structural_tag": 256 << 10,
}
"""Characters of a constraint. Most of a long schema is descriptions, which cost nothing; what is left of it has a limit
of its own."""

LIMITS: Final = LLParserLimits(initial_lexer_fuel=400_000, max_lexer_states=50_000, verbose_errors=False)
