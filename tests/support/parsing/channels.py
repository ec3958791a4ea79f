"""Answers in channels, as gpt-oss writes them, and their replay through a scanner, cut in any way."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.harmony import HarmonyScanner
from minisgl.parsing.names import Parsers
from minisgl.parsing.output import Event
from minisgl.parsing.reasoning import ReasoningState
from support.parsing.answers import TOOLS
from support.parsing.replay import Result, collected

IDS: Final = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
HARMONY: Final = Parsers(tool_calls="gpt-oss", reasoning="gpt-oss")
AS_TOKENS: Final = find_formats(HARMONY, None, IDS)
AS_TEXT: Final = find_formats(HARMONY, None, {})
"""In a vocabulary that has no token for any marker."""

_MARKER: Final = re.compile(f"({'|'.join(map(re.escape, IDS))})")


class Quoted(NamedTuple):
    """Text of ordinary tokens, even where it spells a marker."""

    text: str


def pieces(text: str) -> list[str]:
    """Cut a text into markers and single characters."""
    parts = [part for part in _MARKER.split(text) if part]
    return [piece for part in parts for piece in ([part] if part in IDS else part)]


def replay(
    answers: AnswerFormat,
    parts: Iterable[str | Quoted],
    state: ReasoningState = ReasoningState.BEFORE,
    tools: Mapping[str, Mapping[str, Any]] | None = TOOLS,
    *,
    is_cut: bool = False,
    is_visible: bool = False,
    **options: Any,
) -> Result:
    """Return the output for parts of an answer; one that is a marker of a token is that token."""
    scanner = HarmonyScanner(answers, state, tools, **options)
    events: list[Event] = []
    for part in parts:
        marker = answers.markers.get(part) if isinstance(part, str) else None
        if marker is not None and marker.token is not None:
            scanner.push_marker(marker, is_visible)
        else:
            scanner.push(part if isinstance(part, str) else part.text)
        events += scanner.scan()
    scanner.finish(is_cut=is_cut)
    return collected([*events, *scanner.scan()])


def regrouped(parts: Sequence[str], places: Iterable[int]) -> list[str]:
    """Join the characters of `pieces` between these places to longer texts; markers stay alone."""
    bounds = sorted({0, len(parts), *(place % (len(parts) + 1) for place in places)})
    groups = (parts[begin:end] for begin, end in itertools.pairwise(bounds))
    joined: list[str] = []
    for group in groups:
        for is_marker, run in itertools.groupby(group, key=IDS.__contains__):
            texts = list(run)
            joined += texts if is_marker else ["".join(texts)]
    return joined
