"""Request bodies of OpenAI's API and of /tokenize, field by field, with the ranges that are checked while decoding.

Every optional field may be null. Unknown fields are ignored, and a header of the response names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.sampling import GRAMMARS, Count, CountOrZero, N, SamplingFields, Seed, TokenId

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
CONSTRAINTS: Final = (
    *GRAMMARS,
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields for constrained output, including vLLM's older names; not supported yet."""

UNSUPPORTED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "ChatBody": {
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "chat_template": (),
        "audio": (),
        "reasoning_effort": (),
        "web_search_options": (),
    },
    "CompletionBody": {"suffix": ("",)},
}
"""Unsupported fields of each body, with the values that ask for nothing, as null does."""

MAX_MESSAGES: Final = 2048

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TemplateVariables = dict[str, str | Seed | float | bool | None]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against traffic analysis. Accepted without effect; no client can tell."""


class Body(SamplingFields, kw_only=True):
    """Fields of both chats and completions."""

    model: str | None = None
    max_tokens: CountOrZero | None = None
    min_tokens: CountOrZero | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: TemplateVariables | None = None

    chat_template: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    reasoning_effort: str | None = None
    web_search_options: Any = None


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: N | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
