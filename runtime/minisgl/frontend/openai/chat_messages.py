"""Messages of a chat: from a client's form to what chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, cast

from minisgl.frontend.generation.functions import call_arguments
from minisgl.frontend.generation.media import media_note
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.bodies import CUSTOM_ROLE, ROLES, ContentPart, Message, PredictedOutput, ToolCall
from minisgl.frontend.server.json_body import check_fits, invalid, truncate, unsupported
from minisgl.wire.text import ChatMessage, Role

_custom_role: Final = re.compile(CUSTOM_ROLE)


def parse_messages(messages: Sequence[Message], path: str = "messages") -> tuple[ChatMessage, ...]:
    """Return the messages in the field `path`. Raises ApiError."""
    return tuple(_message(message, f"{path}[{i}]") for i, message in enumerate(messages))


def check_continuable(messages: Sequence[ChatMessage]) -> None:
    """Raises ApiError if the last message has no text that an answer could continue."""
    if messages[-1].content is None:
        raise invalid("continue_final_message", "the last message has no `content` that the answer could continue")


def parse_prediction(prediction: PredictedOutput | None) -> str:
    """Return the text that is expected in the answer; empty: none. Raises ApiError."""
    if prediction is None:
        return ""
    return _joined(prediction.content, "prediction.content")


def _message(message: Message, path: str) -> ChatMessage:
    role, custom_role = _role(message.role, f"{path}.role")
    reject_unsupported(message, f"{path}.")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        if getattr(message, name) not in (None, []) and role != "assistant":
            raise invalid(f"{path}.{name}", "only messages of the role 'assistant' may have it")
    calls = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())] or None
    content = message.content
    if content is not None:
        content = _joined(content, f"{path}.content", is_result=role == "tool")
    if content is None and calls is None and reasoning is None:
        raise invalid(f"{path}.content", "expected a string or a list of text parts")
    return ChatMessage(role, content, message.name, message.tool_call_id, calls, reasoning, custom_role)


def _role(role: str, path: str) -> tuple[Role, str]:
    """Return a role of OpenAI's API, and the role that the template gets if it is another one."""
    if role in ROLES:
        return cast(Role, role), ""
    if role == "function":
        raise unsupported(path, "the role 'function' is not supported; use 'tool'")
    if _custom_role.search(role) is None:
        raise invalid(path, f"expected one of {', '.join(ROLES)}, or a role of the model's chat template")
    return "user", role


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    reject_unsupported(call, f"{path}.")
    arguments: Any = call.function.arguments
    if isinstance(arguments, dict):
        check_fits(arguments, f"{path}.function.arguments")
    else:
        arguments = call_arguments(arguments)
    return {"id": call.id or "", "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _joined(content: str | list[ContentPart], path: str, *, is_result: bool = False) -> str:
    """Return the text of a content, whose parts are lines."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{i}]", is_result) for i, part in enumerate(content))


def _part(part: ContentPart, path: str, is_result: bool) -> str:
    """`is_result`: the part is in the result of a tool."""
    if is_result and (note := media_note(part.type)) is not None:
        return note
    if part.type != "text":
        raise unsupported(f"{path}.type", f"only text parts are supported, not {truncate(part.type)!r}")
    if part.text is None:
        raise invalid(f"{path}.text", "expected a string")
    return part.text
