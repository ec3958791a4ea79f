"""Formats of reasoning and tool calls of one checkpoint, with the markers that its vocabulary has as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from minisgl.parsing.reader import Marker
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
    added_tokens: Mapping[str, int]
    """All tokens that the vocabulary has besides those of its algorithm: ids by text."""
    reasoning_lead: tuple[int, ...] = ()
    """Tokens that an answer has before the token that begins reasoning."""
    ignores_tools: bool = False
    """The chat template has no place for tools, and without a format of calls nothing else describes them: a request
    that does not require a call is answered without one."""

    @property
    def in_channels(self) -> bool:
        """Answers are messages in channels, as `minisgl.parsing.harmony` reads them."""
        return any(part is not None and part.in_channels for part in (self.tools, self.reasoning))

    @property
    def reasoning_tokens(self) -> tuple[int, int] | None:
        """Tokens that begin and end reasoning; None if the model has none, or marks it by text."""
        if self.reasoning is None:
            return None
        start, end = self.markers[self.reasoning.start].token, self.markers[self.reasoning.end].token
        return None if start is None or end is None else (start, end)


def answer_format(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, added_tokens: Mapping[str, int]
) -> AnswerFormat:
    """Resolve the markers of two formats. `added_tokens`: ids by text of the tokens that a vocabulary has besides those
    of its algorithm."""
    texts = [*tools.starts, *tools.inner] if tools is not None else []
    if reasoning is not None:
        texts += [reasoning.start, reasoning.end, *reasoning.inner]
    markers = {text: Marker(text, added_tokens.get(text)) for text in texts}
    by_token = {marker.token: marker for marker in markers.values() if marker.token is not None}
    return AnswerFormat(tools, reasoning, markers, by_token, added_tokens)


PLAIN_ANSWERS: Final = AnswerFormat(None, None, {}, {}, {})
"""Answers of models with neither reasoning nor tool calls."""
