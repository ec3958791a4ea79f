"""Edits of a conversation in `context_management`: thinking of earlier turns that the model shall not see again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl.frontend.anthropic.bodies import ContextEdit, ContextManagement, MessageParam, ThinkingTurns
from minisgl.frontend.generation.unsupported import NO_SHORTENING
from minisgl.frontend.server.json_body import truncate, unsupported

CLEAR_THINKING: Final = "clear_thinking_20251015"
_THINKING: Final = ("thinking", "redacted_thinking")


def cleared_messages(management: ContextManagement | None, messages: Sequence[MessageParam]) -> frozenset[int]:
    """Return the numbers of the messages without their thinking. Raises ApiError for edits that this server does not
    make."""
    cleared: frozenset[int] = frozenset()
    for i, edit in enumerate((management or ContextManagement()).edits or ()):
        if edit.type != CLEAR_THINKING:
            raise unsupported(f"context_management.edits[{i}].type", f"{truncate(edit.type)!r}: {NO_SHORTENING}")
        if (keep := _turns_to_keep(edit)) is not None:
            cleared |= {number for turn in _thinking_turns(messages)[:-keep] for number in turn}
    return cleared


def _turns_to_keep(edit: ContextEdit) -> int | None:
    """Return the number of turns that keep their thinking; None: all."""
    match edit.keep:
        case None:
            return 1
        case ThinkingTurns(value=value):
            return value
    return None


def _thinking_turns(messages: Sequence[MessageParam]) -> list[list[int]]:
    """Return the numbers of the messages with thinking, by turn. The result of a tool continues the turn of its
    call."""
    turns: list[list[int]] = []
    is_new = True
    for number, message in enumerate(messages):
        kinds = set() if isinstance(message.content, str) else {block.type for block in message.content}
        if message.role == "assistant" and not kinds.isdisjoint(_THINKING):
            if is_new:
                turns.append([])
            turns[-1].append(number)
            is_new = False
        elif message.role == "user" and "tool_result" not in kinds:
            is_new = True
    return turns
