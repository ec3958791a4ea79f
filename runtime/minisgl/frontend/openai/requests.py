"""Parsing of chats and completions: from a body to a valid generation request.

Fields that are not supported are known by name, and so are the values of theirs that ask for nothing.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.frontend.generation.constraints import constraint_of
from minisgl.frontend.generation.logit_bias import clamped, decode_body
from minisgl.frontend.generation.prompts import Prompt, parse_prompts
from minisgl.frontend.generation.request import GenerationRequest, check_choices, check_min_tokens
from minisgl.frontend.generation.sampling import sampling_params
from minisgl.frontend.generation.unsupported import NOT_YET, reject_unsupported
from minisgl.frontend.openai.bodies import Body, ChatBody, CompletionBody, StreamOptions
from minisgl.frontend.openai.chat_messages import parse_messages
from minisgl.frontend.openai.responses import Kind, OpenAIFormat
from minisgl.frontend.server.json_body import invalid, unsupported
from minisgl.frontend.server.unknown_fields import unknown_fields
from minisgl.wire.text import SamplingDefaults

COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions; a chat continues to the end of the context."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)


def parse_chat(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_chat_decoder, raw)
    for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if getattr(body, name) and getattr(body, choice) != "none":
            raise unsupported(name, f'{NOT_YET}, or set `{choice}` to "none"')
    if body.max_tokens == 0 and body.max_completion_tokens is None:
        raise invalid("max_tokens", "expected at least 1")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "requires `logprobs: true`")
    return _request(
        "chat",
        body,
        raw,
        defaults,
        prompts=[Prompt(messages=parse_messages(body.messages))],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        template_variables=body.chat_template_kwargs or {},
    )


def parse_completion(raw: bytes, defaults: SamplingDefaults) -> GenerationRequest:
    """Raises ApiError."""
    body = decode_body(_completion_decoder, raw)
    if (body.best_of or 1) > (body.n or 1):
        raise unsupported("best_of", "values above `n` are not supported; leave the field out")
    return _request(
        "completion",
        body,
        raw,
        defaults,
        prompts=list(parse_prompts(body.prompt, "prompt")),
        max_tokens=COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )


def _request(
    kind: Kind,
    body: Body,
    raw: bytes,
    defaults: SamplingDefaults,
    *,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    template_variables: dict[str, Any] | None = None,
) -> GenerationRequest:
    reject_unsupported(body)
    constraint = constraint_of(body)
    n = body.n or 1
    check_choices(prompts, n, max_tokens, "n", len(raw))
    check_min_tokens(body.min_tokens, max_tokens, "min_tokens")
    options = body.stream_options or StreamOptions()
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
            logit_bias=clamped(body.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        ),
        stream=bool(body.stream),
        format=OpenAIFormat(
            kind,
            n,
            scored=logprobs is not None,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        ),
        echo=echo,
        template_variables=template_variables or {},
        priority=body.priority or 0,
        timeout_seconds=body.timeout,
        cache_salt=body.cache_salt or "",
        structured_output=constraint.output if constraint else None,
        structured_output_field=constraint.field if constraint else "",
        ignored=unknown_fields(type(body), raw),
    )
