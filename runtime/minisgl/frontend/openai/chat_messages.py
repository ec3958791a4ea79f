"""Messages of a chat: from a client's form to what chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.bodies import ROLES, ContentPart, Message, ToolCall
from minisgl.frontend.server.json_body import invalid, truncate, unsupported
from minisgl.wire.text import ChatMessage, Role

_MAX_DEPTH: Final = 32
"""Nesting of a tool call's arguments; deeper ones stay text."""


def parse_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Raises ApiError."""
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, path: str) -> ChatMessage:
    if message.role not in ROLES:
        if message.role == "function":
            raise unsupported(f"{path}.role", "the role 'function' is not supported; use 'tool'")
        raise invalid(f"{path}.role", f"expected one of {', '.join(ROLES)}")
    reject_unsupported(message, f"{path}.")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", "only messages of the role 'assistant' may have tool calls")
    calls = [_tool_call(call) for call in message.tool_calls or ()] or None
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if content is None and calls is None:
        raise invalid(f"{path}.content", "expected a string or a list of text parts")
    return ChatMessage(cast(Role, message.role), content, message.name, message.tool_call_id, calls)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    try:
        # Templates render arguments as JSON themselves; arguments that are not JSON stay text.
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and _fits(parsed, _MAX_DEPTH):
        arguments = parsed
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _fits(value: Any, depth: int) -> bool:
    """Whether a message can carry the JSON value: not nested deeper than `depth`, integers of up to 64 bits."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_fits(item, depth - 1) for item in inner)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _part(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise unsupported(f"{path}.type", f"only text parts are supported, not {truncate(part.type)!r}")
    if part.text is None:
        raise invalid(f"{path}.text", "expected a string")
    return part.text
