"""The bodies that clients send, field by field, with the ranges that are checked at once.

Every optional field may be null. Fields that nobody here knows are ignored, and an answer's header names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

DEFAULT_MODEL: Final = "default"
"""Stands for the served model, whatever its name."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
GRAMMARS: Final = ("regex", "ebnf", "structural_tag")
"""Fields for constrained output, which is not supported yet."""
CONSTRAINTS: Final = (
    *GRAMMARS,
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Those of chats and completions, where vLLM's older names are known too: who asks for a structure must not get free
text."""
TOKEN_ID: Final = "token id"

MAX_MESSAGES: Final = 2048
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 1024
"""Of one request: prompts times n."""
MAX_COPIED_BYTES: Final = 64 << 20
"""Of one request: its body times n, for each choice takes its prompt along."""

MAX_ASKED_TOKENS: Final = MAX_CHOICES * 4096
"""Of one request with several choices for a prompt: choices times `max_tokens`, where it says how many."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1, title=TOKEN_ID)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=16)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=256)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
N = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]


TemplateVariables = dict[str, str | Seed | float | bool | None]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against traffic analysis: not done, and no client can tell."""


class Body(msgspec.Struct, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    max_tokens: CountOrZero | None = None
    min_tokens: CountOrZero | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    n: N | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None

    # Taken, and without any effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
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


class NativeSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: CountOrZero | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    sampling_seed: Seed | None = None
    n: N | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None

    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None


class NativeBody(msgspec.Struct, kw_only=True):
    """POST /generate: `text` or `input_ids` with `sampling_params`, or `prompt` with `max_tokens`."""

    text: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None

    prompt: str | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None


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
