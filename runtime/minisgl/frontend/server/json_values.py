"""Free JSON values in bodies, which messages to tokenizer workers take along."""

from __future__ import annotations

from typing import Any, Final

from minisgl.frontend.server.json_body import invalid

MAX_DEPTH: Final = 64
"""Nesting of objects and lists."""


def fits_message(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether a message can carry the value: not nested deeper than `depth`, integers of up to 64 bits."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(fits_message(item, depth - 1) for item in inner)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def check_fits(value: Any, param: str) -> None:
    """Raises ApiError for a value that no message can carry."""
    if not fits_message(value):
        raise invalid(param, f"expected at most {MAX_DEPTH} levels of nesting and integers of at most 64 bits")
