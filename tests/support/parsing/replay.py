"""Replays of generated text through a scanner, cut in any way."""

from __future__ import annotations

import codecs
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.output import Event, Reasoning, Text
from minisgl.parsing.reasoning import ReasoningState
from minisgl.parsing.scanner import Scanner
from support.parsing.answers import TOOLS

SPECIAL = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>"})
"""Markers that are special tokens: they have no text of their own."""


class Result(NamedTuple):
    """Everything that came out of a scanner."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]
    """Names and arguments."""


def formats(tool_parser: str, tokens: Iterable[str] = ()) -> AnswerFormat:
    """Return formats of a vocabulary in which these markers are tokens."""
    reasoning = "mistral" if tool_parser == "mistral" else "qwen3"
    parsers = Parsers(tool_calls=tool_parser, reasoning=reasoning)  # type: ignore[arg-type]
    return find_formats(parsers, None, {text: number for number, text in enumerate(tokens)})


def replay(
    answers: AnswerFormat,
    pieces: Iterable[str],
    state: ReasoningState = ReasoningState.BEFORE,
    tools: Mapping[str, Mapping[str, Any]] | None = TOOLS,
    **options: Any,
) -> Result:
    """Return the output for pieces of an answer. A piece that is a marker of a token is that token."""
    scanner = Scanner(answers, state, tools, **options)
    events: list[Event] = []
    for piece in pieces:
        if (marker := answers.markers.get(piece)) is not None and marker.token is not None:
            scanner.push_marker(marker, is_visible=piece not in SPECIAL)
        else:
            scanner.push(piece)
        events += scanner.scan()
    scanner.finish()
    return collected([*events, *scanner.scan()])


def collected(events: Iterable[Event]) -> Result:
    """Join events, and check that each call begins with its whole name and an identifier, and is never mixed."""
    reasoning, text, calls = "", "", list[list[str]]()
    ids = set[str]()
    for event in events:
        match event:
            case Reasoning():
                reasoning += event.text
            case Text():
                text += event.text
            case _ if event.name:
                assert event.index == len(calls) and event.arguments == "" and event.id not in ids
                ids.add(event.id)
                calls.append([event.name, ""])
            case _:
                assert event.index == len(calls) - 1 and event.id == "" and event.arguments
                calls[-1][1] += event.arguments
    return Result(reasoning, text, [(name, arguments) for name, arguments in calls])


def tokens(answers: AnswerFormat, text: str) -> list[str]:
    """Cut a text at the markers that are tokens of its own vocabulary."""
    markers = [text for text, marker in answers.markers.items() if marker.token is not None]
    if not markers:
        return [text]
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return [part for part in parts if part]


def cut(parts: Sequence[str], answers: AnswerFormat, rng: random.Random) -> list[str]:
    """Cut each part that is no marker at random places."""
    pieces: list[str] = []
    for part in parts:
        if (marker := answers.markers.get(part)) is not None and marker.token is not None:
            pieces.append(part)
            continue
        count = min(len(part) - 1, rng.choice((0, 1, 3, 10, len(part) // 4)))
        places = sorted(rng.sample(range(1, len(part)), count)) if count > 0 else []
        pieces += [part[begin:end] for begin, end in itertools.pairwise([0, *places, len(part)])]
    return pieces


def by_bytes(text: str, places: Sequence[int] | None = None) -> list[str]:
    """Cut a text at places in its UTF-8, by default behind each byte. Bytes of a character come with its last one."""
    data = text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")()
    bounds = [0, *(range(1, len(data)) if places is None else places), len(data)]
    return [decoder.decode(data[begin:end]) for begin, end in itertools.pairwise(bounds)]
