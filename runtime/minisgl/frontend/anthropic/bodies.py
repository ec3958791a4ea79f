"""Bodies of POST /v1/messages and /v1/messages/count_tokens, field by field, with the ranges that are checked while
decoding.

Every optional field may be null. Unknown fields are ignored, and a header of the response names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.frontend.generation.functions import MAX_FUNCTIONS
from minisgl.frontend.generation.sampling import Count, Stop
from minisgl.frontend.generation.unsupported import supports
from minisgl.frontend.openai.bodies import MAX_MESSAGES
from minisgl.frontend.openai.extra_fields import ExtraFields

_NO_SERVERS: Final = "this server runs no tools; declare them in `tools`, and run them in the client"


class ResultBlock(msgspec.Struct):
    """Block in the result of a tool."""

    type: str
    text: str | None = None
    tool_name: str | None = None
    """Tool that a search of the client has found."""
    title: str | None = None
    source: Any = None
    """Content of a document or another medium; address of a search result."""
    content: Any = None
    """Texts of a search result."""

    # Accepted without effect.
    cache_control: Any = None
    citations: Any = None


class Block(msgspec.Struct):
    """Content block; `type` says which fields it has."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None

    # Accepted without effect.
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class MessageParam(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: thinking is only in the signature."""


class JsonOutput(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class AllTurns(msgspec.Struct, tag_field="type", tag="all"):
    """All turns keep their thinking."""


class ThinkingTurns(msgspec.Struct, tag_field="type", tag="thinking_turns"):
    """The last `value` turns with thinking keep it."""

    value: Count


class ContextEdit(msgspec.Struct):
    type: str
    keep: Literal["all"] | AllTurns | ThinkingTurns | None = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


class CountTokensBody(ExtraFields, kw_only=True):
    """POST /v1/messages/count_tokens. Sampling parameters do not change the count."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    """Former place of `output_config.format`."""
    context_management: ContextManagement | None = None

    # Accepted without effect.
    cache_control: Any = None

    mcp_servers: Annotated[list[Any] | None, supports([], problem=_NO_SERVERS)] = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    stream: bool | None = None

    # Accepted without effect.
    metadata: Any = None
    service_tier: str | None = None
    inference_geo: str | None = None

    container: Annotated[Any, supports(problem=_NO_SERVERS)] = None
