"""Text from other programs, shortened for a status."""

from __future__ import annotations

from typing import Final

_MAX_QUOTE_LENGTH: Final = 400


def truncate(text: str, length: int) -> str:
    """The text on one line of at most `length` characters, without control characters."""
    printable = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def quote(text: str) -> str:
    """Another program's message, truncated to 400 characters."""
    return truncate(text, _MAX_QUOTE_LENGTH)
