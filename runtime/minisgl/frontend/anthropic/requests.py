"""Parsing of POST /v1/messages: from a body to a valid generation request."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.frontend.anthropic.bodies import CountTokensBody, JsonOutput, MessagesBody, OutputConfig, Thinking
from minisgl.frontend.anthropic.messages import ParsedMessages, parse_messages
from minisgl.frontend.anthropic.responses import MessagesFormat
from minisgl.frontend.anthropic.tools import ParsedTools, parse_tools
from minisgl.frontend.generation.prompts import Prompt
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.generation.template_variables import template_variables
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.extra_fields import extra_options, extra_params, reject_chat_fields
from minisgl.frontend.server.json_body import decode, invalid
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.text import (
    BUDGET_VARIABLE,
    THINKING_VARIABLES,
    Rendering,
    RequestOptions,
    SamplingDefaults,
    StructuredOutput,
)

_decoder: Final = msgspec.json.Decoder(MessagesBody)


class Conversation(msgspec.Struct, frozen=True):
    """Everything that determines the prompt of a request."""

    parsed: ParsedMessages
    tools: ParsedTools
    rendering: Rendering

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self.tools.ignored, *self.parsed.ignored)


def parse_conversation(body: CountTokensBody) -> Conversation:
    """Raises ApiError."""
    reject_unsupported(body)
    tools = parse_tools(body.tools or (), body.tool_choice)
    variables = template_variables(body.chat_template_kwargs)
    # Without the field there is no thinking in this API.
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    for name in THINKING_VARIABLES:
        variables.setdefault(name, thinks)
    effort = (body.output_config or OutputConfig()).effort
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if body.thinking is not None and body.thinking.type == "enabled" and body.thinking.budget_tokens is not None:
        variables.setdefault(BUDGET_VARIABLE, body.thinking.budget_tokens)
    parsed = parse_messages(body)
    rendering = Rendering(
        template_variables=variables,
        add_generation_prompt=not parsed.continues,
        continue_final_message=parsed.continues,
    )
    return Conversation(parsed, tools, rendering)


def parse_message_request(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode(_decoder, raw)
    unknown = unknown_fields(MessagesBody, raw)
    reject_chat_fields(unknown, MessagesBody)
    conversation = parse_conversation(body)
    output = _structured_output(body)
    return GenerationRequest(
        model=body.model,
        prompts=[Prompt(messages=conversation.parsed.messages)],
        params=extra_params(body, defaults, max_tokens=body.max_tokens, stop=body.stop_sequences or ()),
        format=MessagesFormat(
            max_tokens=body.max_tokens,
            thinking_omitted=body.thinking is not None and body.thinking.display == "omitted",
        ),
        options=RequestOptions(
            rendering=conversation.rendering,
            tools=conversation.tools.options,
            stream=bool(body.stream),
            structured_output=output,
            thinking_budget=_thinking_budget(body.thinking, body.max_tokens),
            soft_limits=True,
            **extra_options(body),
        ),
        timeout_seconds=body.timeout,
        tool_fields=conversation.tools.fields,
        structured_output_field="output_format.schema" if body.output_format else "output_config.format.schema",
        ignored=(*unknown, *conversation.ignored),
    )


def _thinking_budget(thinking: Thinking | None, max_tokens: int) -> int | None:
    budget = None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens
    if budget is not None and budget >= max_tokens:
        raise invalid("thinking.budget_tokens", f"expected less than `max_tokens`, {max_tokens}")
    return budget


def _structured_output(body: MessagesBody) -> StructuredOutput | None:
    format: JsonOutput | None = body.output_format or (body.output_config or OutputConfig()).format
    return None if format is None else StructuredOutput("json", msgspec.json.encode(format.schema).decode())
