"""Names of formats, as the flags take them: those of vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from minisgl.options import option

ToolCallParser = Literal[
    "auto",
    "none",
    "ernie45",
    "exaone4",
    "gemma4",
    "glm45",
    "glm47",
    "gpt-oss",
    "granite",
    "hermes",
    "hunyuan",
    "hunyuan_a13b",
    "lfm2",
    "llama3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek-r1",
    "deepseek-v3",
    "deepseek_r1",
    "deepseek_v3",
    "ernie45",
    "gemma4",
    "glm45",
    "gpt-oss",
    "granite",
    "hunyuan_a13b",
    "kimi",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "qwen3-thinking",
    "seed_oss",
]


class Parsers(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of the model's answers."""

    tool_calls: Annotated[
        ToolCallParser,
        option(
            "format of tool calls, if another one than the chat template and the vocabulary suggest; none: calls are "
            "not parsed"
        ),
    ] = msgspec.field(default="auto", name="tool_call_parser")
    reasoning: Annotated[
        ReasoningParser,
        option("format of reasoning, likewise; none: reasoning is part of the text"),
    ] = msgspec.field(default="auto", name="reasoning_parser")
