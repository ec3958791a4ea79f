"""Finds the formats of a checkpoint's answers: by name, or from its chat template and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from minisgl.parsing.answer_format import AnswerFormat, answer_format
from minisgl.parsing.hermes import HERMES
from minisgl.parsing.llama_json import LLAMA_JSON
from minisgl.parsing.mistral import MISTRAL
from minisgl.parsing.names import Parsers, ReasoningParser, ToolCallParser
from minisgl.parsing.pythonic import PYTHONIC
from minisgl.parsing.qwen_xml import QWEN_XML
from minisgl.parsing.reasoning import ReasoningFormat
from minisgl.parsing.tool_format import ToolFormat

_THINK: Final = ReasoningFormat("qwen3", "<think>", "</think>")
_THINK_ALWAYS: Final = ReasoningFormat("deepseek_r1", "<think>", "</think>", is_forced=True)
_MISTRAL_THINK: Final = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
_SEED_THINK: Final = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>")
_KIMI_THINK: Final = ReasoningFormat("kimi", "◁think▷", "◁/think▷")
_GRANITE_THINK: Final = ReasoningFormat("granite", "Here is my thought process:", "Here is my response:")

_TOOL_FORMATS: Final[Mapping[ToolCallParser, ToolFormat | None]] = {
    "none": None,
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": QWEN_XML,
    "qwen3_xml": QWEN_XML,
    "llama3": LLAMA_JSON,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
}
_REASONING_FORMATS: Final[Mapping[ReasoningParser, ReasoningFormat | None]] = {
    "none": None,
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "deepseek_r1": _THINK_ALWAYS,
    "deepseek-r1": _THINK_ALWAYS,
    "qwen3-thinking": _THINK_ALWAYS,
    "mistral": _MISTRAL_THINK,
    "seed_oss": _SEED_THINK,
    "kimi": _KIMI_THINK,
    "granite": _GRANITE_THINK,
}
_DETECTED_REASONING: Final = (_THINK, _MISTRAL_THINK, _SEED_THINK, _KIMI_THINK, _GRANITE_THINK)
_USES_TOOLS: Final = re.compile(r"\btools\b")


def find_formats(parsers: Parsers, template: str | None, added_tokens: Mapping[str, int]) -> AnswerFormat:
    """Return the formats that `parsers` names, or that template and vocabulary suggest; see `answer_format`."""
    source = template or ""
    if parsers.tool_calls == "auto":
        tools = _detect_tools(source, added_tokens)
    else:
        tools = _TOOL_FORMATS[parsers.tool_calls]
    if parsers.reasoning == "auto":
        reasoning = _detect_reasoning(source, added_tokens)
    else:
        reasoning = _REASONING_FORMATS[parsers.reasoning]
    return answer_format(tools, reasoning, added_tokens)


def _detect_tools(template: str, added_tokens: Mapping[str, int]) -> ToolFormat | None:
    if not _USES_TOOLS.search(template):
        return None
    if "<function=" in template and "<parameter=" in template:
        return QWEN_XML
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    # Others (GLM) write names and arguments in tags of their own between the same markers.
    if "<tool_call>" in template:
        return HERMES if "<arg_key>" not in template else None
    if "[func_name1(" in template:
        return PYTHONIC
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return LLAMA_JSON
    by_token = (("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES), ("<|python_tag|>", LLAMA_JSON))
    return next((found for text, found in by_token if text in added_tokens), None)


def _detect_reasoning(template: str, added_tokens: Mapping[str, int]) -> ReasoningFormat | None:
    def is_known(reasoning: ReasoningFormat) -> bool:
        return reasoning.end in template or {reasoning.start, reasoning.end} <= added_tokens.keys()

    return next((reasoning for reasoning in _DETECTED_REASONING if is_known(reasoning)), None)
