"""Chats as templates of harmony take them: what they would leave out, or refuse, is rearranged.

Such a template renders instructions only in the first message, one call of a message, and its result under the name of
the last call. Beside a call it takes reasoning or a text, but not both, and a text becomes reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Final

from msgspec.structs import replace

from minisgl.wire.text import ChatMessage, ToolOptions

_EFFORT: Final = "reasoning_effort"
_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Levels that the model does not know, and the nearest one of its own: low, medium and high."""
_PARAGRAPH: Final = "\n\n"


def with_known_effort(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a template with a level of effort that the model knows, if there is one."""
    effort = variables.get(_EFFORT)
    return {**variables, _EFFORT: _EFFORTS[effort]} if isinstance(effort, str) and effort in _EFFORTS else variables


def with_descriptions(tools: ToolOptions | None) -> ToolOptions | None:
    """Return the tools, each with a description, which the template needs; it may be empty."""
    if tools is None:
        return None

    def described(definition: dict[str, Any]) -> dict[str, Any]:
        function = definition["function"]
        return {**definition, "function": {**function, "description": function.get("description") or ""}}

    return replace(tools, definitions=tuple(map(described, tools.definitions)))


def as_channels(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages in a form of which the template leaves nothing out."""
    instructions = [message for message in messages if _is_instruction(message)]
    turns = [replace(message, content=message.content or "") for message in messages if not _is_instruction(message)]
    found: list[ChatMessage] = []
    while turns:
        turn = turns.pop(0)
        if not turn.tool_calls:
            found.append(turn)
            continue
        results = list(takewhile(lambda one: one.role == "tool", turns))
        del turns[: len(results)]
        found += _calls_one_by_one(turn, results)
    if instructions:
        found.insert(0, replace(instructions[0], content=_joined(message.content for message in instructions)))
    return found


def _is_instruction(message: ChatMessage) -> bool:
    return message.role in ("system", "developer") and not message.custom_role


def _calls_one_by_one(turn: ChatMessage, results: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a message for each call, with its results behind it, and the reasoning before the first one."""
    assert turn.tool_calls
    reasoning = _joined((turn.reasoning, turn.content)) or None
    left = list(results)
    found: list[ChatMessage] = []
    for number, call in enumerate(turn.tool_calls):
        found.append(replace(turn, content="", reasoning=None if number else reasoning, tool_calls=[call]))
        is_last = number == len(turn.tool_calls) - 1
        # Results without an identifier of these calls follow the last one.
        own = [one for one in left if is_last or one.tool_call_id == call.get("id")]
        left = [one for one in left if one not in own]
        found += own
    return found


def _joined(texts: Iterable[str | None]) -> str:
    return _PARAGRAPH.join(text for text in texts if text)
