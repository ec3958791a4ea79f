"""The conversation of a chat or of /tokenize, with everything else that determines its prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.frontend.generation.thinking import parse_thinking
from minisgl.frontend.openai.bodies import ChatBody, Message, TokenizeBody
from minisgl.frontend.openai.chat_messages import check_continuable, parse_messages
from minisgl.frontend.server.json_body import invalid
from minisgl.frontend.server.json_values import check_fits
from minisgl.wire.text import ChatMessage


class Conversation(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    fields: dict[str, Any]
    """Fields of `Generate` and `Encode` for the chat template, but for tools."""


def parse_conversation(body: ChatBody | TokenizeBody, messages: list[Message]) -> Conversation:
    """Raises ApiError."""
    parsed = parse_messages(messages)
    continues = bool(body.continue_final_message)
    if continues:
        if body.add_generation_prompt:
            raise invalid("continue_final_message", "requires `add_generation_prompt: false`")
        check_continuable(parsed)
    variables = dict(body.chat_template_kwargs or {})
    check_fits(variables, "chat_template_kwargs")
    check_fits(body.documents, "documents")
    thinking = parse_thinking(body.reasoning_effort, body.enable_thinking, variables)
    fields = {
        "template_variables": variables,
        "thinking": thinking,
        "documents": body.documents or None,
        "add_generation_prompt": body.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
    }
    return Conversation(parsed, fields)


def parse_thinking_budget(body: ChatBody) -> int | None:
    """Return the most tokens of reasoning; None: no limit. Raises ApiError."""
    if body.thinking_token_budget is not None and body.thinking_budget is not None:
        raise invalid("thinking_budget", "is another name of `thinking_token_budget`; use one of them")
    budget = body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget
    return None if budget == -1 else budget
