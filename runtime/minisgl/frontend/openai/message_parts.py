"""Reasoning and tool calls in the JSON of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.wire.text import ToolCallDelta


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both names that clients of other servers read."""
    return {"reasoning": text, "reasoning_content": text}


def full_tool_calls(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return the calls of a complete answer."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in join_pieces(pieces)
    ]


def streamed_tool_calls(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return the new output of calls for one event of a stream. Identifier, type and name of a call are sent once."""
    return [
        {
            "index": call.index,
            **({"id": call.id, "type": "function"} if call.id else {}),
            "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments},
        }
        for call in join_pieces(pieces)
    ]


def join_pieces(pieces: Sequence[ToolCallDelta]) -> Sequence[ToolCallDelta]:
    """Return one piece for each call, in the order of calls."""
    if len(pieces) < 2:
        return pieces
    calls: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [
        ToolCallDelta(index, parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
        for index, parts in calls.items()
    ]
