"""Tools of chats whose template has no place for them: a system text describes them, and the texts of messages have
earlier calls and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_text import call_text
from minisgl.wire.text import ChatMessage, ToolOptions


def with_tools(messages: Sequence[ChatMessage], tools: ToolOptions, answers: AnswerFormat) -> list[ChatMessage]:
    """Return the messages with a description of the tools in the system message, which comes first."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.definitions)
    text = (
        "You can call these functions. Each line is one of them, with the JSON schema of its parameters:\n"
        f"{functions}\n\n"
        "To call functions, end your message with the calls in this form, and with nothing behind them:\n"
        f"{call_text(answers, [('NAME', {'PARAMETER': 'VALUE'})])}\n\n"
        "The next message has their results. Without a call, answer as usual."
    )
    first = messages[0] if messages else None
    if first is None or first.role != "system" or first.custom_role:
        return [ChatMessage("system", text), *messages]
    return [replace(first, content=_joined(first.content, text)), *messages[1:]]


def with_calls_as_text(
    messages: Sequence[ChatMessage], answers: AnswerFormat, *, takes_results: bool
) -> list[ChatMessage]:
    """Return the messages with calls in the text of the assistant, and, unless the template `takes_results` in messages
    of a role of their own, with results as messages of the user. Such a message takes the following one of the user
    in, because many templates want the roles in turn."""
    names: dict[str, str] = {}
    """Name of the function by the identifier of its call."""
    turns: list[ChatMessage] = []
    behind_result = False
    for message in messages:
        is_result = message.role == "tool" and not takes_results
        turn = ChatMessage("user", _result(message, names)) if is_result else _with_calls(message, answers, names)
        if behind_result and turn.role == "user":
            turn = replace(turn, content=_joined(turns.pop().content, turn.content or ""))
        behind_result = is_result
        turns.append(turn)
    return turns


def _with_calls(message: ChatMessage, answers: AnswerFormat, names: dict[str, str]) -> ChatMessage:
    """Return a message with its calls as text, and note their `names`."""
    if not message.tool_calls:
        return message
    functions = [call["function"] for call in message.tool_calls]
    for call, function in zip(message.tool_calls, functions, strict=True):
        names[call.get("id") or ""] = function["name"]
    text = call_text(answers, [(function["name"], function["arguments"]) for function in functions])
    return replace(message, content=_joined(message.content, text), tool_calls=None)


def _result(message: ChatMessage, names: dict[str, str]) -> str:
    name = names.get(message.tool_call_id or "", message.name or "the call")
    return f"Result of {name}:\n{message.content or ''}"


def _joined(content: str | None, text: str) -> str:
    return f"{content}\n\n{text}" if content else text
