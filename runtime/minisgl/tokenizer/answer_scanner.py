"""Scanners of answers: which answers are scanned, and for what."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from minisgl.parsing import harmony
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.incremental import IncrementalScanner
from minisgl.parsing.reasoning import ReasoningState, prompt_state
from minisgl.parsing.scanner import Scanner
from minisgl.tokenizer.callable_tools import callable_tools
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.text import Generate


def reasoning_state(
    generate: Generate, answers: AnswerFormat, token_bytes: TokenBytes, prompt: array[int]
) -> ReasoningState:
    """Return whether an answer may begin with reasoning, continues it, or has none. Only chats have reasoning."""
    if generate.messages is None:
        return ReasoningState.BEHIND

    def text_of(tokens: Sequence[int]) -> str:
        return b"".join(map(token_bytes.name, tokens)).decode("utf-8", "replace")

    if answers.in_channels:
        return harmony.prompt_state(prompt, answers, text_of)
    if answers.reasoning is None:
        return ReasoningState.BEHIND
    notes = {answers.added_tokens.get(text) for text in answers.reasoning.notes}
    state = prompt_state(
        prompt,
        answers.markers[answers.reasoning.start],
        answers.markers[answers.reasoning.end],
        is_special=lambda token: token_bytes.is_special(token) and token not in notes,
        text_of=text_of,
    )
    if state is ReasoningState.BEFORE and answers.reasoning.is_forced:
        return ReasoningState.WITHIN
    return state


def answer_scanner(generate: Generate, answers: AnswerFormat, state: ReasoningState) -> IncrementalScanner | None:
    """Return the scanner of an answer; None for one that is only text. Raises PromptError for tools that cannot be
    called."""
    tools = {tool.name: tool.schema for tool in callable_tools(generate, answers)} or None
    separate = generate.options.separate_reasoning
    if answers.in_channels:
        separate = separate and answers.reasoning is not None
        if tools is None and (generate.messages is None or not separate):
            return None
        return harmony.HarmonyScanner(answers, state, tools, separate_reasoning=separate)
    has_tags = answers.reasoning is not None and answers.reasoning.answer_tags is not None
    marks = state is not ReasoningState.BEHIND or (has_tags and generate.messages is not None)
    separates = separate and marks
    if tools is None and not separates:
        return None
    return Scanner(answers, state, tools, separate_reasoning=separate)
