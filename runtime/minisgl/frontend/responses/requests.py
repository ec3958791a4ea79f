"""Parsing of POST /v1/responses: from a body to a valid generation request."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.frontend.generation.constraints import Constraint, constraint_of
from minisgl.frontend.generation.prompts import Prompt
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.generation.template_variables import parse_thinking, template_variables
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.extra_fields import extra_options, extra_params, reject_chat_fields
from minisgl.frontend.responses.bodies import (
    AnyJsonObject,
    JsonUnderSchema,
    PlainText,
    ReasoningOptions,
    ResponsesBody,
    TextOptions,
)
from minisgl.frontend.responses.items import parse_items
from minisgl.frontend.responses.output import OutputOptions
from minisgl.frontend.responses.responses import ResponsesFormat
from minisgl.frontend.responses.tools import parse_tools
from minisgl.frontend.server.json_body import decode, invalid
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import Rendering, RequestOptions, SamplingDefaults, StructuredOutput

_decoder: Final = msgspec.json.Decoder(ResponsesBody)


def parse_responses(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode(_decoder, raw)
    reject_unsupported(body)
    tools = parse_tools(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    items = parse_items(body.input, body.instructions)
    reasoning = body.reasoning or ReasoningOptions()
    include = frozenset(body.include or ())
    scored = body.top_logprobs is not None or "message.output_text.logprobs" in include
    params = extra_params(
        body,
        defaults,
        max_tokens=body.max_output_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        logprobs=(body.top_logprobs or 0) if scored else None,
    )
    text = body.text or TextOptions()
    constraint = _constraint(body, text)
    unknown = unknown_fields(ResponsesBody, raw)
    reject_chat_fields(unknown, ResponsesBody)
    variables = template_variables(body.chat_template_kwargs)
    thinking = parse_thinking(reasoning.effort, None, variables, "reasoning.effort")
    return GenerationRequest(
        model=body.model,
        prompts=[Prompt(messages=items.messages)],
        params=params,
        format=ResponsesFormat(
            _repeated(body, params),
            OutputOptions(
                tools.names,
                scored,
                sealed_reasoning="reasoning.encrypted_content" in include,
                summarized_reasoning=bool(reasoning.summary or reasoning.generate_summary),
            ),
        ),
        options=RequestOptions(
            rendering=Rendering(template_variables=variables, thinking=thinking),
            tools=tools.options,
            stream=bool(body.stream),
            structured_output=None if constraint is None else constraint.output,
            **extra_options(body),
        ),
        timeout_seconds=body.timeout,
        tool_fields=tools.fields,
        structured_output_field="" if constraint is None else constraint.field,
        ignored=(*unknown, *tools.ignored, *items.ignored),
    )


def _constraint(body: ResponsesBody, text: TextOptions) -> Constraint | None:
    other = constraint_of(body)
    if text.format is None or isinstance(text.format, PlainText):
        return other
    if other is not None:
        raise invalid(other.field, "cannot be combined with text.format; send one constraint")
    match text.format:
        case AnyJsonObject():
            return Constraint("text.format", StructuredOutput("json", '{"type":"object"}'))
        case JsonUnderSchema(schema=schema):
            value = msgspec.json.encode(schema).decode()
            return Constraint("text.format.schema", StructuredOutput("json", value))


def _repeated(body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of the response that repeat the request."""
    reasoning = body.reasoning or ReasoningOptions()
    text = body.text or TextOptions()
    format: Any = {"type": "text"} if text.format is None else text.format
    return {
        "background": False,
        "conversation": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": format, "verbosity": text.verbosity},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        # Encoded once for the several events that have them.
        "tools": msgspec.Raw(msgspec.json.encode([_with_strict(tool) for tool in body.tools or ()])),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _with_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that clients expect in each function of a response."""
    return {"parameters": None, "strict": False, **tool} if tool.get("type") == "function" else tool
