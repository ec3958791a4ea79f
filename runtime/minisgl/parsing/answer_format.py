"""Formats of reasoning and tool calls of one checkpoint, with the markers that its vocabulary has as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from minisgl.parsing.markers import Marker
from minisgl.parsing.reasoning import ReasoningFormat
from minisgl.parsing.tool_format import ToolFormat


class AnswerFormat(msgspec.Struct, frozen=True):
    """Everything about the answers of a checkpoint that a scanner must know."""

    tools: ToolFormat | None
    """None: the model cannot call tools, or its format is unknown."""
    reasoning: ReasoningFormat | None
    markers: Mapping[str, Marker]
    """All markers of both formats by text."""
    by_token: Mapping[int, Marker]
    """Those that are tokens, by id."""


def answer_format(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, token_id: Callable[[str], int | None]
) -> AnswerFormat:
    """Resolve the markers of two formats. `token_id` returns the id of a text that is a single token."""
    texts = [*tools.starts, *tools.inner] if tools is not None else []
    if reasoning is not None:
        texts += [reasoning.start, reasoning.end]
    markers = {text: Marker(text, token_id(text)) for text in texts}
    by_token = {marker.token: marker for marker in markers.values() if marker.token is not None}
    return AnswerFormat(tools, reasoning, markers, by_token)


PLAIN_ANSWERS: Final = AnswerFormat(None, None, {}, {})
"""Answers of models with neither reasoning nor tool calls."""
