"""Request bodies of OpenAI's API and of /tokenize, field by field, with the ranges that are checked while decoding.

Every optional field may be null. Unknown fields are ignored, and a header of the response names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.constraints import AnyFormat, Choices, SchemaOrText, StructuredOutputs
from minisgl.frontend.generation.functions import MAX_FUNCTIONS
from minisgl.frontend.generation.prompts import MAX_PROMPTS
from minisgl.frontend.generation.sampling import Count, CountOrZero, N, SamplingFields, Seed, TokenId, TopLogprobs
from minisgl.frontend.generation.template_variables import EFFORTS, RESERVED
from minisgl.frontend.generation.unsupported import (
    NO_BEAMS,
    NO_LORA,
    NO_SHORTENING,
    Compaction,
    Fallbacks,
    KvTransfer,
    Moderation,
    Prediction,
    Thread,
    supports,
    with_fields,
)
from minisgl.frontend.openai.tools import TOOL_CHOICE_SCHEMA, TOOL_SCHEMA

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
CUSTOM_ROLE: Final = r"^[a-zA-Z][a-zA-Z0-9_-]{0,63}$(?!\n)"
MAX_MESSAGES: Final = 2048

_USE_TOOLS: Final = "replaced by `tools` and `tool_choice`; use these"
_NO_CODE: Final = "code of a request is not run; use `logit_bias`, `bad_words` or `allowed_token_ids`"
_STOP_IN_OUTPUT: Final = "has another name here; use `include_stop_str_in_output`"
_NO_TOKENS: Final = "not supported in chats; send the token ids as `prompt` to /v1/completions"
_NO_EMBEDDINGS: Final = "embeddings are not supported; send a text or token ids"
_NO_PROMPT: Final = "not supported in chats; send it to /v1/completions"
_NO_VERBOSITY: Final = "no model has such a control; ask for a short or a long answer in a message"
_ONLY_IN_CHATS: Final = "a prompt is used as it is, and so is the answer; send `messages` to /v1/chat/completions"

Unsupported = Annotated[Any, supports()]
JsonValue = Annotated[Any, Meta(extra_json_schema={"$ref": "#/components/schemas/JsonValue"})]
TemplateVariables = Annotated[
    dict[str, JsonValue], Meta(extra_json_schema={"propertyNames": {"not": {"enum": list(RESERVED)}}})
]
Tool = Annotated[dict[str, Any], Meta(extra_json_schema=TOOL_SCHEMA)]
ToolChoice = Annotated[Any, Meta(extra_json_schema=TOOL_CHOICE_SCHEMA)]
Effort = Annotated[str, Meta(extra_json_schema={"enum": list(EFFORTS)})]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1, extra_json_schema={"not": {"const": 0}})]


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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None

    response_format: AnyFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    guided_whitespace_pattern: Annotated[str | None, supports()] = None
    best_of: N | None = None
    """Accepted up to `n`, where it selects nothing."""
    use_beam_search: Annotated[bool | None, supports(False, problem=NO_BEAMS)] = None
    lora_path: Annotated[Any, supports(problem=NO_LORA)] = None
    logits_processors: Annotated[Any, supports([], problem=_NO_CODE)] = None
    custom_logit_processor: Annotated[Any, supports(problem=_NO_CODE)] = None
    repetition_detection: Unsupported = None
    return_hidden_states: Annotated[bool | None, supports(False)] = None
    no_stop_trim: Annotated[bool | None, supports(False, problem=_STOP_IN_OUTPUT)] = None
    context_management: Annotated[Any, supports([], {}, problem=NO_SHORTENING)] = None


_OF_SERVICES: Final[Mapping[str, Any]] = {
    "moderation": Moderation,
    "compaction": Compaction,
    "thread": Thread,
    "fallbacks": Fallbacks,
    "kv_transfer_params": KvTransfer,
    # Accepted without effect.
    "metadata": dict[str, Any] | None,
    "store": bool | None,
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), str | None),
}
"""Fields of chats and completions that ask a service for more than an answer."""


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class PredictedOutput(msgspec.Struct):
    type: Literal["content"]
    content: str | list[ContentPart]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, JsonValue]
    """JSON text of an object; some clients send the object."""


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: Annotated[str | None, supports("function", problem="only calls of functions are supported")] = None


class Message(msgspec.Struct):
    role: Annotated[str, Meta(extra_json_schema={"pattern": CUSTOM_ROLE, "not": {"const": "function"}})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Other name of `reasoning_content`."""
    function_call: Annotated[Any, supports(problem="not supported; use tool_calls")] = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatFields(Body, kw_only=True):
    """Fields of chats, but for their messages."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None
    thinking_budget: ThinkingBudget | None = None
    """Other name of `thinking_token_budget`."""
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None

    chat_template_kwargs: TemplateVariables | None = None
    documents: Annotated[list[dict[str, JsonValue]], Meta(max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    chat_template: Unsupported = None
    prompt: Annotated[Any, supports("", [], problem=_NO_PROMPT)] = None
    prompt_token_ids: Annotated[Any, supports([], problem=_NO_TOKENS)] = None
    prompt_embeds: Annotated[Any, supports([], problem=_NO_EMBEDDINGS)] = None
    stream_reasoning: Annotated[bool | None, supports(True, problem="reasoning is streamed as it comes")] = None
    functions: Annotated[list[Any] | None, supports([], problem=_USE_TOOLS)] = None
    function_call: Annotated[Any, supports("none", "auto", problem=_USE_TOOLS)] = None
    suffix: Annotated[str | None, supports("")] = None
    verbosity: Annotated[str | None, supports("medium", problem=_NO_VERBOSITY)] = None
    modalities: Annotated[list[str] | None, supports(["text"], problem="only text is supported")] = None
    audio: Unsupported = None
    web_search_options: Unsupported = None


class _Chat(ChatFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    prediction: PredictedOutput | None = None


ChatBody: Final = with_fields("ChatBody", _Chat, _OF_SERVICES)


class _ChatBatch(ChatFields, kw_only=True):
    """POST /v1/chat/completions/batch: several conversations, each with choices of its own."""

    messages: Annotated[list[Messages], Meta(min_length=1, max_length=MAX_PROMPTS)]
    prediction: Prediction = None


ChatBatchBody: Final = with_fields("ChatBatchBody", _ChatBatch, _OF_SERVICES)


def _only_in_chats(type_: Any, *values: Any) -> Any:
    return Annotated[type_, supports(*values, problem=_ONLY_IN_CHATS)]


class CompletionFields(Body, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, supports("")] = None
    prompt_embeds: Annotated[Any, supports([], problem=_NO_EMBEDDINGS)] = None


_IN_CHATS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("messages", "tools", "documents", "functions"), _only_in_chats(Any, [])),
    **dict.fromkeys(("tool_choice", "function_call"), _only_in_chats(Any, "none", "auto")),
    **dict.fromkeys(("reasoning_effort", "enable_thinking"), _only_in_chats(Any)),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget"), _only_in_chats(int | None, -1)),
    **dict.fromkeys(("include_reasoning", "stream_reasoning"), _only_in_chats(bool | None, True)),
    **dict.fromkeys(
        ("separate_reasoning", "add_generation_prompt", "continue_final_message"), _only_in_chats(bool | None, False)
    ),
    "chat_template_kwargs": _only_in_chats(Any, {}),
    "max_completion_tokens": Annotated[Any, supports(problem="a field of chats; use `max_tokens`")],
    "top_logprobs": Annotated[int | None, supports(0, problem="a field of chats; use `logprobs`")],
    "prompt_token_ids": Annotated[Any, supports([], problem="not supported; send the token ids as `prompt`")],
    "modalities": Annotated[Any, supports(["text"], problem="only text is supported")],
    "prediction": Prediction,
    # Without tools, both values ask for nothing.
    "parallel_tool_calls": bool | None,
}
"""Fields of chats of which a completion accepts values that ask for what it does anyway; its others are as in chats."""


def _chat_fields() -> dict[str, Any]:
    known = get_type_hints(ChatBody, include_extras=True)
    others = [name for name in ChatBody.__struct_fields__ if name not in CompletionFields.__struct_fields__]
    return {name: _IN_CHATS.get(name, known[name]) for name in others}


CompletionBody: Final = with_fields("CompletionBody", CompletionFields, _chat_fields())


class Invocation(msgspec.Struct, kw_only=True):
    """POST /invocations: the body of a chat, which has messages, or else of a completion."""

    messages: list[msgspec.Raw] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_FUNCTIONS)] | None = None
    documents: Annotated[list[dict[str, JsonValue]], Meta(max_length=MAX_MESSAGES)] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
