"""Messages of a conversation: from the content blocks of the Messages API to what chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from minisgl.frontend.anthropic.bodies import Block, CountTokensBody, ResultBlock
from minisgl.frontend.anthropic.context_edits import cleared_messages
from minisgl.frontend.generation.media import media_note
from minisgl.frontend.generation.sealed_reasoning import unseal
from minisgl.frontend.server.json_body import check_fits, invalid, missing, truncate, unsupported
from minisgl.wire.text import ChatMessage

_BILLING: Final = "x-anthropic-billing-header:"
"""Beginning of a system block that Claude Code sends for its own servers. It differs in every request, so no request
would find the prefix of another one in the cache."""


class ParsedMessages(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    continues: bool
    """The answer continues the last message, which is the assistant's."""
    ignored: tuple[str, ...]
    """Paths of blocks that are left out."""


def parse_messages(body: CountTokensBody) -> ParsedMessages:
    """Raises ApiError."""
    messages: list[ChatMessage] = []
    ignored: list[str] = []
    cleared = cleared_messages(body.context_management, body.messages)
    if body.system is not None:
        system = _system(body.system, "system")
        if system:
            messages.append(ChatMessage("system", system))
    for i, message in enumerate(body.messages):
        path = f"messages[{i}].content"
        match message.role:
            case "system":
                messages.append(ChatMessage("system", _system(message.content, path)))
            case "user":
                messages += _user(message.content, path, ignored)
            case "assistant":
                messages += _assistant(message.content, path, ignored, thinks=i not in cleared)
    if body.messages[-1].role != "assistant":
        return ParsedMessages(tuple(messages), False, tuple(ignored))
    if messages[-1].tool_calls or not messages[-1].content:
        problem = "expected text that the answer continues; the results of tools belong to a last message of the user"
        raise invalid(f"messages[{len(body.messages) - 1}].content", problem)
    return ParsedMessages(tuple(messages), True, tuple(ignored))


def _system(content: str | Sequence[Block], path: str) -> str:
    texts = [content] if isinstance(content, str) else [_text(block, f"{path}[{i}]") for i, block in enumerate(content)]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _user(content: str | Sequence[Block], path: str, ignored: list[str]) -> list[ChatMessage]:
    """Return a message for each result of a tool and for the texts between them."""
    if isinstance(content, str):
        return [ChatMessage("user", content)]
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for i, block in enumerate(content):
        if block.type == "tool_result":
            if texts:
                messages.append(ChatMessage("user", "\n".join(texts)))
                texts = []
            messages.append(_tool_result(block, f"{path}[{i}]", ignored))
        else:
            texts.append(_text(block, f"{path}[{i}]"))
    if texts or not messages:
        messages.append(ChatMessage("user", "\n".join(texts)))
    return messages


def _tool_result(block: Block, path: str, ignored: list[str]) -> ChatMessage:
    if block.tool_use_id is None:
        raise missing(f"{path}.tool_use_id")
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(_result(part, f"{path}.content[{i}]", ignored) for i, part in enumerate(content))
    if block.is_error:
        # Templates have no other way to say so.
        content = f"Error: {content}"
    return ChatMessage("tool", content, tool_call_id=block.tool_use_id)


def _result(block: ResultBlock, path: str, ignored: list[str]) -> str:
    match block.type:
        case "tool_reference":
            if block.tool_name is None:
                raise missing(f"{path}.tool_name")
            # The definitions of all tools are in the prompt, also of those that the client would load later.
            return f"The tool {block.tool_name} is available."
        case "search_result":
            address = block.source if isinstance(block.source, str) else None
            texts = _texts(block.content, f"{path}.content", ignored)
            return "\n".join(filter(None, (block.title, address, texts)))
        case "document" if isinstance(source := block.source, dict) and source.get("type") in ("text", "content"):
            name = "data" if source["type"] == "text" else "content"
            return "\n".join(filter(None, (block.title, _texts(source.get(name), f"{path}.source.{name}", ignored))))
    return _text_or_note(block, path, ignored)


def _texts(content: Any, path: str, ignored: list[str]) -> str:
    """Return the text of a document or search result, which is a string or has blocks. Raises ApiError."""
    if isinstance(content, str):
        return content
    try:
        blocks = msgspec.convert(content, list[ResultBlock])
    except msgspec.ValidationError:
        raise invalid(path, "expected a string or a list of content blocks") from None
    return "\n".join(_text_or_note(block, f"{path}[{i}]", ignored) for i, block in enumerate(blocks))


def _text_or_note(block: ResultBlock, path: str, ignored: list[str]) -> str:
    if (note := media_note(block.type)) is None:
        return _text(block, path)
    if block.source is not None:
        ignored.append(f"{path}.source")
    return note


def _assistant(content: str | Sequence[Block], path: str, ignored: list[str], *, thinks: bool) -> list[ChatMessage]:
    """Return the messages of a turn, with its thinking if it `thinks`: text behind the use of a tool begins another
    one."""
    if isinstance(content, str):
        return [ChatMessage("assistant", content)]
    turns = [_Turn()]
    for i, block in enumerate(content):
        place = f"{path}[{i}]"
        if turns[-1].calls and block.type != "tool_use":
            turns.append(_Turn())
        turn = turns[-1]
        match block.type:
            case "thinking" | "redacted_thinking" if not thinks:
                continue
            case "thinking":
                turn.thinking.append(_thinking(block, place, ignored))
            case "redacted_thinking":
                ignored.append(place)
            case "tool_use":
                turn.calls.append(_tool_use(block, place))
            case _:
                turn.texts.append(_text(block, place))
    return [turn.message() for turn in turns]


class _Turn(msgspec.Struct):
    thinking: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []

    def message(self) -> ChatMessage:
        content = "\n".join(self.texts) if self.texts or not self.calls else None
        reasoning = "\n".join(filter(None, self.thinking)) or None
        return ChatMessage("assistant", content, tool_calls=self.calls or None, reasoning=reasoning)


def _thinking(block: Block, path: str, ignored: list[str]) -> str:
    if block.thinking:
        return block.thinking
    thinking = unseal(block.signature or "")
    if thinking is None:
        ignored.append(path)
    return thinking or ""


def _tool_use(block: Block, path: str) -> dict[str, Any]:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise missing(f"{path}.{name}")
    check_fits(block.input, f"{path}.input")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _text(block: Block | ResultBlock, path: str) -> str:
    if block.type != "text":
        problem = f"{truncate(block.type)!r} is not supported here; only text can be passed on to the model"
        raise unsupported(f"{path}.type", problem)
    if block.text is None:
        raise missing(f"{path}.text")
    return block.text
