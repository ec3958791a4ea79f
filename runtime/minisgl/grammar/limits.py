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

_MAX_ALTERNATIVES: Final = 20_000
"""Places in the grammar at which an answer may be at once. Each property that may come next takes three or four, each
choice one: 4,096 choices take 0.04 s to compile and 10 MB, 1,000 optional properties 0.09 s and 6 MB."""

_MAX_MASK_ALTERNATIVES: Final = 1_000_000
"""The same for all tokens of a mask together, of which each may end at another place. 2,000 optional properties
take up to 300,000 with a vocabulary of 151,000 tokens; masks at this limit take 0.2 s."""

LIMITS: Final = LLParserLimits(
    max_items_in_row=_MAX_ALTERNATIVES,
    step_max_items=_MAX_MASK_ALTERNATIVES,
    initial_lexer_fuel=400_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
