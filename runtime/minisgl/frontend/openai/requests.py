"""Parsing of chats and completions: from a body to a valid generation request.

Fields that are not supported are known by name, and so are the values of theirs that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from minisgl.frontend.generation.constraints import constraint_of
from minisgl.frontend.generation.logit_bias import decode_body
from minisgl.frontend.generation.prompts import Prompt, parse_prompts
from minisgl.frontend.generation.request import GenerationRequest, check_choices, check_min_tokens
from minisgl.frontend.generation.sampling import check_tops, sampling_params, text_options
from minisgl.frontend.generation.unsupported import reject_unsupported
from minisgl.frontend.openai.bodies import (
    Body,
    ChatBatchBody,
    ChatBody,
    ChatFields,
    CompletionBody,
    Invocation,
    PredictedOutput,
    StreamOptions,
)
from minisgl.frontend.openai.chat_messages import parse_prediction
from minisgl.frontend.openai.conversation import parse_conversation, parse_rendering, parse_thinking_budget
from minisgl.frontend.openai.responses import Kind, OpenAIFormat
from minisgl.frontend.openai.tools import parse_tools
from minisgl.frontend.server.json_body import decode, invalid, unsupported
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.text import ChatMessage, Rendering, RequestOptions, SamplingDefaults

COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions; a chat continues to the end of the context."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_chat_batch_decoder: Final = msgspec.json.Decoder(ChatBatchBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)
_invocation_decoder: Final = msgspec.json.Decoder(Invocation)


def parse_chat(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_chat_decoder, raw)
    return _chat(body, raw, defaults, [parse_conversation(body, body.messages)], body.prediction)


def parse_chat_batch(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_chat_batch_decoder, raw)
    conversations = [parse_conversation(body, one, f"messages[{i}]") for i, one in enumerate(body.messages)]
    return _chat(body, raw, defaults, conversations)


def _chat(
    body: ChatFields,
    raw: bytes,
    defaults: SamplingDefaults,
    conversations: list[tuple[ChatMessage, ...]],
    prediction: PredictedOutput | None = None,
) -> GenerationRequest:
    if body.max_tokens == 0 and body.max_completion_tokens is None:
        raise invalid("max_tokens", "expected at least 1")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "requires `logprobs: true`")
    check_tops("top_logprobs", body.top_logprobs)
    tools = parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return _request(
        "chat",
        body,
        raw,
        defaults,
        prompts=[Prompt(messages=messages) for messages in conversations],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_fields=tools.fields,
        options={
            "rendering": parse_rendering(body, add_special_tokens=body.add_special_tokens is not False),
            "tools": tools.options,
            "separate_reasoning": body.separate_reasoning is not False,
            "thinking_budget": parse_thinking_budget(body),
            "prediction": parse_prediction(prediction),
        },
        format={
            "named_tool": tools.options is not None and tools.options.choice == "named",
            "reasoning": body.include_reasoning is not False,
            "echoes": tuple(map(_echoed, conversations)) if body.echo else (),
            "predicted": prediction is not None,
        },
    )


def _echoed(messages: Sequence[ChatMessage]) -> str:
    """Return the text that precedes the answer in a response with `echo`: the assistant's message that it follows."""
    last = messages[-1]
    return (last.content or "") if last.role == "assistant" else ""


def parse_completion(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_completion_decoder, raw)
    check_tops("logprobs", body.logprobs)
    return _request(
        "completion",
        body,
        raw,
        defaults,
        prompts=list(parse_prompts(body.prompt, "prompt")),
        max_tokens=COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        options={
            "rendering": Rendering(add_special_tokens=body.add_special_tokens is not False),
            "echo": bool(body.echo),
        },
    )


def parse_invocation(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Return the request for the body of a chat or of a completion. Raises ApiError."""
    is_chat = decode(_invocation_decoder, raw).messages
    return (parse_chat if is_chat else parse_completion)(raw, defaults)


def _request(
    kind: Kind,
    body: Body,
    raw: bytes,
    defaults: SamplingDefaults,
    *,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    options: dict[str, Any],
    tool_fields: tuple[str, ...] = (),
    format: dict[str, Any] | None = None,
) -> GenerationRequest:
    """Return the request for a body. `options` and `format`: fields of `RequestOptions` and of `OpenAIFormat` that
    only chats or only completions have."""
    reject_unsupported(body)
    check_tops("prompt_logprobs", body.prompt_logprobs)
    constraint = constraint_of(body)
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "expected at least 1, or -1 for as many as the context allows")
    n = body.n or 1
    if (body.best_of or 1) > n:
        raise unsupported("best_of", "values above `n` are not supported; leave the field out")
    check_choices(prompts, n, max_tokens, "n", len(raw))
    check_min_tokens(body.min_tokens, max_tokens, "min_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "not available in streams; set `stream` to false")
    if body.logprob_token_ids and logprobs is None:
        raise invalid("logprob_token_ids", "requires `logprobs`")
    stream_options = body.stream_options or StreamOptions()
    prompt_tops = [body.prompt_logprobs, logprobs if options.get("echo") else None]
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        n=n,
        params=sampling_params(
            body,
            defaults,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            seed=body.seed,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            logprobs=logprobs,
            logprob_token_ids=tuple(body.logprob_token_ids or ()),
            prompt_logprobs=max((tops for tops in prompt_tops if tops is not None), default=None),
        ),
        format=OpenAIFormat(
            kind,
            n,
            scored=logprobs is not None,
            include_usage=bool(stream_options.include_usage),
            continuous_usage=bool(stream_options.include_usage and stream_options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            tops=logprobs,
            named_tokens=bool(body.logprob_token_ids),
            prompt_tops=body.prompt_logprobs,
            **(format or {}),
        ),
        options=RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            stream=bool(body.stream),
            return_token_ids=bool(body.return_token_ids),
            structured_output=constraint.output if constraint else None,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
            **text_options(body),
            **options,
        ),
        timeout_seconds=body.timeout,
        tool_fields=tool_fields,
        structured_output_field=constraint.field if constraint else "",
        ignored=unknown_fields(type(body), raw),
    )
