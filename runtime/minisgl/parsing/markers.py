"""Markers of reasoning and tool calls in an answer."""

from __future__ import annotations

import msgspec


class Marker(msgspec.Struct, frozen=True):
    """A text that separates the parts of an answer, such as `<tool_call>`."""

    text: str
    token: int | None
    """Its token, if the vocabulary has it as a single one. Then only this token is the marker, and the same text of
    other tokens is ordinary text, such as a quotation."""
