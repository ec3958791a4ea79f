"""Body of POST /v1/responses, field by field, with the ranges that are checked while decoding.

Every optional field may be null. Unknown fields are ignored, and a header of the response names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.constraints import StructuredOutputs
from minisgl.frontend.generation.functions import MAX_FUNCTIONS
from minisgl.frontend.generation.sampling import Count, Stop
from minisgl.frontend.generation.unsupported import NO_SHORTENING, supports
from minisgl.frontend.openai.bodies import MAX_MESSAGES
from minisgl.frontend.openai.extra_fields import ExtraFields

_STATELESS: Final = "responses are not stored; send the whole conversation as `input`"
_NO_BACKGROUND: Final = "responses are not stored; leave the field out and read the response from this request"
_NO_TRUNCATION: Final = 'input is never shortened; leave items out of `input`, or use "disabled"'

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # They add to the output of tools that this server does not run.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ItemPart(msgspec.Struct):
    """Part of a message, of a tool's output or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None

    # Accepted without effect.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class InputItem(msgspec.Struct):
    """Item of the conversation; `type` says which fields it has. Without it, an item with a role is a message."""

    type: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ItemPart] | None = None

    # Accepted without effect.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    caller: Any = None


class ReasoningOptions(msgspec.Struct):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """Former name of `summary`."""


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class AnyJsonObject(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonUnderSchema(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON that is valid under a schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    """Accepted without effect: a schema is always enforced."""


class TextOptions(msgspec.Struct):
    format: PlainText | AnyJsonObject | JsonUnderSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect, as no model has such a control."""


class ResponsesStreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None
    """Padding against traffic analysis. Accepted without effect; no client can tell."""


class ResponsesBody(ExtraFields, kw_only=True):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    structured_outputs: StructuredOutputs | None = None
    """Other constraints than those of `text.format`, as in chats."""
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    """OpenAI's API has neither of the two."""

    # Repeated in the response, without another effect.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: Count | None = None
    """Limit of the calls of tools that a server runs."""

    # Accepted without effect.
    store: bool | None = None
    """The response has `false`: nothing is stored."""
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    client_metadata: Any = None

    background: Annotated[bool | None, supports(False, problem=_NO_BACKGROUND)] = None
    previous_response_id: Annotated[Any, supports(problem=_STATELESS)] = None
    conversation: Annotated[Any, supports(problem=_STATELESS)] = None
    prompt: Annotated[Any, supports(problem="prompt templates are not stored; send `instructions` and `input`")] = None
    truncation: Annotated[str | None, supports("disabled", problem=_NO_TRUNCATION)] = None
    context_management: Annotated[list[Any] | None, supports([], problem=NO_SHORTENING)] = None
