"""Takes a generated answer apart: reasoning, text, tool calls.

Nothing is lost: what looks like a call and is none is text. What comes out does not depend on how the answer was cut
into tokens. Line breaks around reasoning and spaces around calls belong to the template, and are left out, but for
those that keep the texts before and behind a call apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.markers import Marker
from minisgl.parsing.output import Event, Output, call_id
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan, held_suffix
from minisgl.parsing.reasoning import ReasoningState
from minisgl.parsing.tool_format import ToolFormat, Tools

_LINE_BREAK: Final = "\n"


@dataclass
class _Gap:
    """Spaces between two texts with calls between them."""

    before: str
    """Before the first call."""
    behind: str = ""
    """Behind the calls."""


class Scanner:
    """Scanner of one answer. Give it text and markers as they are generated, then call `scan`."""

    def __init__(
        self,
        format: AnswerFormat,
        state: ReasoningState = ReasoningState.BEHIND,
        tools: Tools | None = None,
        *,
        separate_reasoning: bool = True,
    ) -> None:
        """`state`: place of the prompt's end. `tools`: those that may be called; None: calls are ordinary text.
        Without `separate_reasoning`, reasoning and its markers are part of the text; calls within it do not count."""
        self._format = format
        self._calls = format.tools if tools is not None else None
        self._tools: Tools = tools or {}
        self._separate = separate_reasoning
        self._reader = Reader()
        self._output = Output(call_id if self._calls is None else self._calls.new_id)
        self.is_plain = False
        """What is still to come is ordinary text: it need not be scanned."""
        self.has_reasoning = False
        """The answer has reasoning, which may have ended."""
        self.in_reasoning = False
        """The text that was scanned last is reasoning."""
        self._gap: _Gap | None = None
        """Spaces around the calls since the last text; None: there was no call, or no text before it."""
        self._has_text = False
        self._begins_line = True
        """Nothing but spaces was taken since the last line break, the last call, or the beginning of the text."""
        self._scan = self._answer(state)
        next(self._scan)

    @property
    def by_token(self) -> Mapping[int, Marker]:
        """Markers that are tokens, for `push_marker`."""
        return self._format.by_token

    @property
    def tool_calls(self) -> int:
        """Number of tool calls so far."""
        return self._output.calls

    def push(self, text: str) -> None:
        """Add text of tokens that are no markers."""
        self._reader.push(text)

    def push_marker(self, marker: Marker, is_visible: bool) -> None:
        """Add a token that is a marker. `is_visible`: its text is part of the answer's text."""
        self._reader.push_marker(marker, is_visible)

    def finish(self) -> None:
        """Note that nothing more will be added."""
        self._reader.ended = True

    def scan(self) -> list[Event]:
        """Return what is certain of the output by now, since the last call."""
        next(self._scan, None)
        return self._output.take()

    def abandon(self) -> list[Event]:
        """Return the output after `scan` has failed; what was not scanned is text."""
        self._reader.at = 0
        self._output.text(self._reader.take(len(self._reader.text)))
        return self._output.take()

    def _answer(self, state: ReasoningState) -> Scan[None]:
        reasoning = self._format.reasoning
        lead = ""
        if reasoning is not None and state is not ReasoningState.BEHIND:
            start, end = self._format.markers[reasoning.start], self._format.markers[reasoning.end]
            is_open = yield from self._opens(start)
            if is_open or state is ReasoningState.WITHIN or reasoning.is_forced:
                self.has_reasoning = self.in_reasoning = True
                yield from self._reasoning(end)
                self.in_reasoning = False
                lead = _LINE_BREAK if self._separate else ""
        if self._calls is None:
            yield from self._text(lead)
        else:
            yield from self._text_and_calls(lead, self._calls)

    def _opens(self, start: Marker) -> Scan[bool]:
        """Skip the marker that begins reasoning, and spaces before it; False: something else follows."""
        reader = self._reader
        while True:
            at = len(reader.text) - len(reader.text.lstrip(SPACE))
            if self._is_at(start, at):
                end = at + len(start.text)
                if self._separate:
                    reader.at = end
                    reader.commit()
                else:
                    self._output.text(reader.take(end))
                return True
            rest = reader.text[at:]
            if reader.ended or (rest and (start.token is not None or not start.text.startswith(rest))):
                return False
            yield

    def _reasoning(self, end: Marker) -> Scan[None]:
        """Pass on reasoning, and skip the marker that ends it."""
        reader = self._reader
        emit = self._output.reasoning if self._separate else self._output.text
        around = _LINE_BREAK if self._separate else ""
        lead = around
        needles = (end.text,) if end.token is None else ()
        while True:
            reader.at = len(reader.text) - len(reader.text.lstrip(lead))
            reader.commit()
            if reader.text:
                lead = ""
            at = self._find(end)
            if at is not None:
                behind = at + len(end.text)
                taken = len(reader.text[:at].rstrip(around)) if self._separate else behind
                emit(reader.take(taken))
                reader.at = behind - taken
                reader.commit()
                return
            if reader.ended:
                emit(reader.take(len(reader.text)))
                return
            safe = held_suffix(reader.text, 0, needles)
            emit(reader.take(len(reader.text[:safe].rstrip(around))))
            yield

    def _text(self, lead: str) -> Scan[None]:
        """Pass on text, without the characters `lead` at its beginning."""
        while True:
            lead = self._emit(len(self._reader.text), lead)
            self.is_plain = not lead
            if self._reader.ended:
                return
            yield

    def _text_and_calls(self, lead: str, calls: ToolFormat) -> Scan[None]:
        """Pass on text, without the characters `lead` at its beginning, and calls. Spaces before a call are held,
        because they are left out."""
        reader, output = self._reader, self._output
        needles = tuple(start for start in calls.starts if self._format.markers[start].token is None)
        pattern = re.compile("|".join(map(re.escape, needles))) if needles else None
        while True:
            start = self._next_start(calls, pattern)
            if start is None and reader.ended:
                self._emit(len(reader.text), lead)
                return
            end = held_suffix(reader.text, 0, needles) if start is None else start[0]
            safe = len(reader.text[:end].rstrip(SPACE))
            lead = self._emit(safe, lead)
            if start is None:
                yield
                continue
            begin, end = start[0] - safe, start[1] - safe
            spaces = reader.text[:begin]
            reader.at = begin
            before = output.calls
            try:
                yield from calls.parse(reader, output, self._tools)
            except Ended:
                # The answer was cut. Of a call that has begun, only syntax is left; a marker alone is none either.
                if output.calls == before and reader.text[begin:].rstrip() not in calls.starts[:1]:
                    reader.at = 0
                    self._emit(len(reader.text), lead)
                return
            except NotACall:
                reader.at = 0
                lead = self._emit(end, lead)
            else:
                reader.commit()
                lead = SPACE
                self._begins_line = True
                if self._gap is None and self._has_text:
                    self._gap = _Gap(spaces)

    def _next_start(self, calls: ToolFormat, pattern: re.Pattern[str] | None) -> tuple[int, int] | None:
        """Return begin and end of what may begin the next call; None if nothing does."""
        reader = self._reader
        found = [
            (mark.at, mark.at + len(mark.marker.text)) for mark in reader.marks if mark.marker.text in calls.starts
        ]
        if pattern is not None and (match := pattern.search(reader.text)) is not None:
            found.append(match.span())
        at = reader.text.find(calls.bare) if calls.bare else -1
        while at >= 0:
            line = reader.text.rfind(_LINE_BREAK, 0, at) + 1
            if (line or self._begins_line) and not reader.text[line:at].strip():
                found.append((at, at + 1))
                break
            at = reader.text.find(calls.bare, at + 1)
        return min(found, default=None)

    def _emit(self, end: int, lead: str) -> str:
        """Pass on the text up to this position, without the characters `lead` at its beginning. Returns those that are
        still to be left out."""
        taken = self._reader.take(end)
        text = taken.lstrip(lead)
        if self._gap is not None:
            self._gap.behind += taken[: len(taken) - len(text)]
        if not text:
            return lead
        if self._gap is not None:
            self._output.text(self._gap.before or self._gap.behind or " ")
            self._gap = None
        self._has_text = True
        self._output.text(text)
        self._begins_line = text.endswith(_LINE_BREAK)
        return ""

    def _find(self, marker: Marker) -> int | None:
        """Return the position of a marker."""
        if marker.token is None:
            at = self._reader.text.find(marker.text)
            return at if at >= 0 else None
        return next((mark.at for mark in self._reader.marks if mark.marker == marker), None)

    def _is_at(self, marker: Marker, at: int) -> bool:
        if marker.token is None:
            return self._reader.text.startswith(marker.text, at)
        return any(mark.at == at and mark.marker == marker for mark in self._reader.marks)
