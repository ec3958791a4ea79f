"""Input items: from the conversation as the Responses API has it to the messages that chat templates expect.

One turn of the assistant is several items there (reasoning, a message, calls) and one message here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from minisgl.frontend.generation.functions import call_arguments
from minisgl.frontend.generation.media import media_note
from minisgl.frontend.generation.sealed_reasoning import unseal
from minisgl.frontend.responses.bodies import InputItem, ItemPart
from minisgl.frontend.responses.custom_input import ARGUMENT
from minisgl.frontend.responses.tools import function_name
from minisgl.frontend.server.json_body import invalid, missing, truncate, unsupported
from minisgl.wire.text import ChatMessage, Role

ROLES: Final = ("user", "assistant", "system", "developer")
TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
LEFT_OUT: Final = ("web_search_call", "image_generation_call")
"""Items of tools that OpenAI's servers ran. They say only that there was a call, not what it found."""

_PROBLEMS: Final = {
    "item_reference": "items are not stored; send the items themselves, which most clients do with `store: false`",
    "compaction": "only the server that made the summary can read it; send the conversation itself",
}


class ParsedItems(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    ignored: tuple[str, ...]
    """Paths of items that are left out."""


def parse_items(items: str | Sequence[InputItem], instructions: str | None) -> ParsedItems:
    """Return the messages of a conversation; `instructions` come before it. Raises ApiError."""
    conversation = _Conversation()
    if instructions:
        conversation.add_message("system", instructions)
    if isinstance(items, str):
        conversation.add_message("user", items)
        items = ()
    for i, item in enumerate(items):
        conversation.add(item, f"input[{i}]")
    messages = conversation.messages()
    if not messages:
        raise invalid("input", "expected at least one message")
    return ParsedItems(_join_instructions(messages), tuple(conversation.ignored))


class _Conversation:
    def __init__(self) -> None:
        self.ignored: list[str] = []
        self._messages: list[ChatMessage] = []
        self._turn = _Turn()

    def add(self, item: InputItem, path: str) -> None:
        kind = "message" if item.type is None and item.role is not None else item.type
        match kind:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                arguments = call_arguments(_given(item.arguments, f"{path}.arguments"))
                self._add_call(item, path, arguments)
            case "custom_tool_call":
                self._add_call(item, path, {ARGUMENT: _given(item.input, f"{path}.input")})
            case "function_call_output" | "custom_tool_call_output":
                call_id = _given(item.call_id, f"{path}.call_id")
                if item.output is None:
                    raise missing(f"{path}.output")
                self.add_message("tool", _text(item.output, f"{path}.output", is_result=True), call_id)
            case None:
                raise missing(f"{path}.type")
            case _ if kind in LEFT_OUT:
                self.ignored.append(path)
            case _:
                problem = _PROBLEMS.get(kind, "no item of this type can be passed on to the model; leave it out")
                raise unsupported(f"{path}.type", f"{truncate(kind)!r}: {problem}")

    def add_message(self, role: Role, content: str, tool_call_id: str | None = None) -> None:
        """Add a message that is not the assistant's."""
        self._end_turn()
        self._messages.append(ChatMessage(role, content, tool_call_id=tool_call_id))

    def messages(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def _add_message(self, item: InputItem, path: str) -> None:
        role = _given(item.role, f"{path}.role")
        if role not in ROLES:
            raise invalid(f"{path}.role", f"expected one of {', '.join(ROLES)}")
        if item.content is None:
            raise missing(f"{path}.content")
        text = _text(item.content, f"{path}.content")
        if role != "assistant":
            self.add_message(cast(Role, role), text)
            return
        if self._turn.content is not None or self._turn.calls:
            self._end_turn()
        self._turn.content = text

    def _add_reasoning(self, item: InputItem, path: str) -> None:
        if self._turn.content is not None or self._turn.calls:
            self._end_turn()
        reasoning = _text(item.content or [], f"{path}.content")
        summary = _text(item.summary or [], f"{path}.summary")
        if not reasoning and item.encrypted_content:
            unsealed = unseal(item.encrypted_content)
            if unsealed is None:
                self.ignored.append(f"{path}.encrypted_content")
            reasoning = unsealed or ""
        self._turn.reasoning.append(reasoning or summary)

    def _add_call(self, item: InputItem, path: str, arguments: Any) -> None:
        name = function_name(_given(item.name, f"{path}.name"), item.namespace)
        call_id = _given(item.call_id, f"{path}.call_id")
        function = {"name": name, "arguments": arguments}
        self._turn.calls.append({"id": call_id, "type": "function", "function": function})

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        reasoning = "\n".join(filter(None, turn.reasoning)) or None
        if turn.content is not None or turn.calls or reasoning:
            calls = turn.calls or None
            self._messages.append(
                ChatMessage("assistant", turn.content, tool_calls=calls, reasoning=reasoning)
                if calls or turn.content is not None
                # An answer that was cut off while it reasoned.
                else ChatMessage("assistant", "", reasoning=reasoning)
            )


class _Turn(msgspec.Struct):
    """Items of the assistant that become one message."""

    reasoning: list[str] = []
    content: str | None = None
    calls: list[dict[str, Any]] = []


def _join_instructions(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join the instructions at the beginning to one message: many templates take a single one."""
    leading = list(itertools.takewhile(lambda message: message.role in ("system", "developer"), messages))
    if len(leading) < 2:
        return tuple(messages)
    joined = "\n\n".join(message.content or "" for message in leading)
    return (ChatMessage("system", joined), *messages[len(leading) :])


def _text(content: str | Sequence[ItemPart], path: str, *, is_result: bool = False) -> str:
    """`is_result`: the content is the result of a tool."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{i}]", is_result) for i, part in enumerate(content))


def _part(part: ItemPart, path: str, is_result: bool) -> str:
    if is_result and (note := media_note(part.type)) is not None:
        return note
    if part.type == "refusal":
        return _given(part.refusal, f"{path}.refusal")
    if part.type not in TEXT_PARTS:
        raise unsupported(f"{path}.type", f"only text is supported, not {truncate(part.type)!r}; leave the part out")
    return _given(part.text, f"{path}.text")


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise missing(path)
    return value
