"""Finds the formats of a checkpoint's answers: by name, or from its chat template and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from minisgl.parsing.answer_format import AnswerFormat, answer_format
from minisgl.parsing.gemma_call import GEMMA
from minisgl.parsing.harmony import CHANNEL, HARMONY_CALLS, HARMONY_REASONING, MESSAGE
from minisgl.parsing.hunyuan import HUNYUAN, HUNYUAN_LIST
from minisgl.parsing.llama_json import LLAMA_JSON
from minisgl.parsing.marked_json import JSON_FORMATS
from minisgl.parsing.mistral import MISTRAL
from minisgl.parsing.names import Parsers
from minisgl.parsing.pythonic import PYTHONIC, PYTHONIC_LINES, PYTHONIC_MARKED
from minisgl.parsing.reasoning import ReasoningFormat
from minisgl.parsing.tool_format import ToolFormat
from minisgl.parsing.xml_call import XML_FORMATS

_THINK: Final = ReasoningFormat("qwen3", "<think>", "</think>")
_THINK_RESPOND: Final = replace(_THINK, name="ernie45", answer_tags=("<response>", "</response>"))
_THINK_ANSWER: Final = replace(_THINK, name="hunyuan_a13b", answer_tags=("<answer>", "</answer>"))
_THINK_ALWAYS: Final = ReasoningFormat("deepseek_r1", "<think>", "</think>", is_forced=True)
_MISTRAL_THINK: Final = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
_SEED_NOTES: Final = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
_SEED_THINK: Final = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", notes=_SEED_NOTES)
_GEMMA_THINK: Final = ReasoningFormat("gemma4", "<|channel>", "<channel|>", label="thought\n")
_KIMI_THINK: Final = ReasoningFormat("kimi", "◁think▷", "◁/think▷")
_GRANITE_THINK: Final = ReasoningFormat("granite", "Here is my thought process:", "Here is my response:")

_TOOL_FORMATS: Final[Mapping[str, ToolFormat | None]] = {
    "none": None,
    **dict.fromkeys(("hermes", "qwen", "qwen25", "ernie45"), JSON_FORMATS["hermes"]),
    "gemma4": GEMMA,
    "hunyuan": HUNYUAN,
    "hunyuan_a13b": HUNYUAN_LIST,
    "lfm2": PYTHONIC_MARKED,
    "olmo3": PYTHONIC_LINES,
    "exaone4": JSON_FORMATS["exaone4"],
    "granite": JSON_FORMATS["granite"],
    "nemotron_json": JSON_FORMATS["nemotron_json"],
    "phi4_mini_json": JSON_FORMATS["phi4_mini"],
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), XML_FORMATS["qwen3_coder"]),
    "glm45": XML_FORMATS["glm45"],
    "glm47": XML_FORMATS["glm47"],
    "minimax_m2": XML_FORMATS["minimax_m2"],
    "seed_oss": XML_FORMATS["seed_oss"],
    "llama3": LLAMA_JSON,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "gpt-oss": HARMONY_CALLS,
    "openai": HARMONY_CALLS,
}
_REASONING_FORMATS: Final[Mapping[str, ReasoningFormat | None]] = {
    "none": None,
    **dict.fromkeys(("qwen3", "deepseek_v3", "deepseek-v3", "glm45", "minimax_m2", "olmo3"), _THINK),
    "ernie45": _THINK_RESPOND,
    "gemma4": _GEMMA_THINK,
    "hunyuan_a13b": _THINK_ANSWER,
    "deepseek_r1": _THINK_ALWAYS,
    "deepseek-r1": _THINK_ALWAYS,
    "qwen3-thinking": _THINK_ALWAYS,
    "mistral": _MISTRAL_THINK,
    "seed_oss": _SEED_THINK,
    "kimi": _KIMI_THINK,
    "granite": _GRANITE_THINK,
    "gpt-oss": HARMONY_REASONING,
    "openai_gptoss": HARMONY_REASONING,
}
_DETECTED_REASONING: Final = (_THINK, _MISTRAL_THINK, _SEED_THINK, _GEMMA_THINK, _KIMI_THINK, _GRANITE_THINK)
_TAGGED_ANSWERS: Final = (_THINK_RESPOND, _THINK_ANSWER)
"""Formats that differ from `_THINK` by tags around the text."""
_BY_TEXT: Final[tuple[tuple[tuple[str, ...], ToolFormat], ...]] = (
    (("<|tool_call>", "<|turn>"), GEMMA),
    (("<minimax:tool_call>",), XML_FORMATS["minimax_m2"]),
    (("<seed:tool_call>",), XML_FORMATS["seed_oss"]),
    (("<function=", "<parameter="), XML_FORMATS["qwen3_coder"]),
    (("<function_calls>",), PYTHONIC_LINES),
    (("<|tool_call_start|>",), PYTHONIC_MARKED),
    (("<TOOLCALL>",), JSON_FORMATS["nemotron_json"]),
    (("<tool_calls>", "```json"), HUNYUAN),
    (("<tool_calls>[",), HUNYUAN_LIST),
    (("[TOOL_CALLS]",), MISTRAL),
    (("</arg_key><arg_value>",), XML_FORMATS["glm47"]),
    (("<arg_key>",), XML_FORMATS["glm45"]),
    (("<tool_call>", "<tool_result>"), JSON_FORMATS["exaone4"]),
    (("<tool_call>",), JSON_FORMATS["hermes"]),
    (("<|/tool|>",), JSON_FORMATS["phi4_mini"]),
    (("<|tool_call|>",), JSON_FORMATS["granite"]),
    (("[func_name1(",), PYTHONIC),
    (("<|python_tag|>",), LLAMA_JSON),
)
"""Texts that the templates of families have, in the order in which they decide."""
_BY_TOKEN: Final = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", JSON_FORMATS["hermes"]),
    ("<|tool_call_start|>", PYTHONIC_MARKED),
    ("<|python_tag|>", LLAMA_JSON),
)
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
        if reasoning is _THINK and tools is XML_FORMATS["glm45"]:
            # Its prompts end before the line break, and later models' behind the marker.
            reasoning = replace(_THINK, before="\n")
    else:
        reasoning = _REASONING_FORMATS[parsers.reasoning]
    return answer_format(tools, reasoning, added_tokens)


def _detect_tools(template: str, added_tokens: Mapping[str, int]) -> ToolFormat | None:
    if not _USES_TOOLS.search(template):
        return None
    if _has_channels(template):
        return HARMONY_CALLS
    for texts, found in _BY_TEXT:
        if all(text in template for text in texts):
            return found
    if "ipython" in template and "parameters" in template:
        return LLAMA_JSON
    return next((found for text, found in _BY_TOKEN if text in added_tokens), None)


def _detect_reasoning(template: str, added_tokens: Mapping[str, int]) -> ReasoningFormat | None:
    if _has_channels(template):
        return HARMONY_REASONING

    def is_known(reasoning: ReasoningFormat) -> bool:
        return reasoning.end in template or {reasoning.start, reasoning.end} <= added_tokens.keys()

    def has_tags(reasoning: ReasoningFormat) -> bool:
        assert reasoning.answer_tags is not None
        return reasoning.answer_tags[0] in template or {*reasoning.answer_tags} <= added_tokens.keys()

    found = next((reasoning for reasoning in _DETECTED_REASONING if is_known(reasoning)), None)
    # MiniMax has results of tools between tags of this name.
    if found is _THINK and "<minimax:tool_call>" not in template:
        return next(filter(has_tags, _TAGGED_ANSWERS), found)
    return found


def _has_channels(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template
