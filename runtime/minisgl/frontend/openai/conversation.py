"""The conversation of a chat or of /tokenize, with everything else that determines its prompt."""

from __future__ import annotations

from minisgl.frontend.generation.template_variables import parse_thinking, template_variables
from minisgl.frontend.openai.bodies import ChatFields, Message, TokenizeBody
from minisgl.frontend.openai.chat_messages import check_continuable, parse_messages
from minisgl.frontend.server.json_body import check_fits, invalid
from minisgl.wire.text import BUDGET_VARIABLE, ChatMessage, Rendering


def parse_conversation(
    body: ChatFields | TokenizeBody, messages: list[Message], path: str = "messages"
) -> tuple[ChatMessage, ...]:
    """Return the messages in the field `path` of a body. Raises ApiError."""
    parsed = parse_messages(messages, path)
    if body.continue_final_message:
        check_continuable(parsed)
    return parsed


def parse_rendering(body: ChatFields | TokenizeBody, *, add_special_tokens: bool) -> Rendering:
    """Return what else determines the prompt of a conversation, but for tools. Raises ApiError."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "requires `add_generation_prompt: false`")
    variables = template_variables(body.chat_template_kwargs)
    budget = parse_thinking_budget(body) if isinstance(body, ChatFields) else None
    if budget is not None:
        variables.setdefault(BUDGET_VARIABLE, budget)
    check_fits(body.documents, "documents")
    return Rendering(
        thinking=parse_thinking(body.reasoning_effort, body.enable_thinking, variables),
        template_variables=variables,
        documents=body.documents or None,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        add_special_tokens=add_special_tokens,
    )


def parse_thinking_budget(body: ChatFields) -> int | None:
    """Return the most tokens of reasoning; None: no limit. Raises ApiError."""
    if body.thinking_token_budget is not None and body.thinking_budget is not None:
        raise invalid("thinking_budget", "is another name of `thinking_token_budget`; use one of them")
    budget = body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget
    return None if budget == -1 else budget
