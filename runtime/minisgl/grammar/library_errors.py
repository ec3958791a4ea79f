"""Codes and first lines of the library's errors, which are texts."""

from __future__ import annotations

import re
from typing import Final

_POSITION: Final = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_TOO_COMPLEX: Final = re.compile(
    r"(?<!range end )too (big|large|complex|deep|many)|limit|fuel|max is|Unable to determine", re.IGNORECASE
)
_DEAD_END: Final = "NoExtension"


def first_line(message: str) -> str:
    """Return an error in one line, without its position in a grammar that nobody but us has seen."""
    return _POSITION.sub("", message.partition("\n")[0])


def code_of(problem: str, otherwise: str) -> str:
    """Return `grammar_too_complex` for a limit that was exceeded, or the other code."""
    return "grammar_too_complex" if _TOO_COMPLEX.search(problem) else otherwise


def is_dead_end(problem: str) -> bool:
    """Whether the error says that no text can follow, though the answer may not end."""
    return problem.startswith(_DEAD_END)
