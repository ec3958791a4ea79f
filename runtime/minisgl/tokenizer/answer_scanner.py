"""Scanners of answers: which answers are scanned, and for what."""

from __future__ import annotations

from array import array
from typing import Any

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.reasoning import ReasoningState, prompt_state
from minisgl.parsing.scanner import Scanner
from minisgl.parsing.tool_format import Tools
from minisgl.tokenizer.errors import PromptError
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.text import Generate, ToolOptions


def reasoning_state(
    generate: Generate, answers: AnswerFormat, token_bytes: TokenBytes, prompt: array[int]
) -> ReasoningState:
    """Return whether an answer may begin with reasoning, continues it, or has none. Only chats have reasoning."""
    if answers.reasoning is None or generate.messages is None:
        return ReasoningState.BEHIND
    state = prompt_state(
        prompt,
        answers.markers[answers.reasoning.start],
        answers.markers[answers.reasoning.end],
        is_special=token_bytes.is_special,
        text_of=lambda tokens: b"".join(map(token_bytes.name, tokens)).decode("utf-8", "replace"),
    )
    if state is ReasoningState.BEFORE and answers.reasoning.is_forced:
        return ReasoningState.WITHIN
    return state


def answer_scanner(generate: Generate, answers: AnswerFormat, state: ReasoningState) -> Scanner | None:
    """Return the scanner of an answer; None for one that is only text. Raises PromptError for tools that cannot be
    called."""
    tools = None if generate.tools is None else callable_tools(generate.tools, answers)
    separates = generate.separate_reasoning and state is not ReasoningState.BEHIND
    if tools is None and not separates:
        return None
    return Scanner(answers, state, tools, separate_reasoning=generate.separate_reasoning)


def callable_tools(options: ToolOptions, answers: AnswerFormat) -> Tools | None:
    """Return the tools that the model may call; None if it may not. Raises PromptError if the format of its calls is
    unknown."""
    if options.choice == "none":
        return None
    if answers.tools is None:
        raise PromptError(
            "tools_unavailable",
            "the format in which this model calls tools is unknown: start the server with --tool-call-parser, or "
            'request tool_choice "none"',
            "tools",
        )
    return {name: parameters for name, parameters in map(_tool, options.definitions) if name}


def _tool(definition: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    function = definition.get("function") or {}
    parameters = function.get("parameters")
    return str(function.get("name", "")), parameters if isinstance(parameters, dict) else {}
