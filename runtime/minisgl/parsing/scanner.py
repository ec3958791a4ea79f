"""Takes a generated answer apart: reasoning, text, tool calls.

Nothing is lost: what looks like a call and is none is text. What comes out does not depend on how the answer was cut
into tokens. Line breaks around reasoning, spaces around calls and tags around a whole answer belong to the template,
and are left out, but for those spaces that keep the texts before and behind a call apart. A call in reasoning that is
still open counts where nothing else answers: models forget to close their reasoning, but also rehearse calls in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.incremental import IncrementalScanner
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output, call_id
from minisgl.parsing.reader import Ended, Marker, NotACall, Reader, Scan, held_suffix
from minisgl.parsing.reasoning import ReasoningState
from minisgl.parsing.tool_format import ToolFormat, Tools
from minisgl.wire.text import ToolCallDelta

_LINE_BREAK: Final = "\n"
_FENCE: Final = "```"


@dataclass
class _Gap:
    """Spaces between two texts with calls between them."""

    before: str
    """Before the first call."""
    behind: str = ""
    """Behind the calls."""


class Scanner(IncrementalScanner):
    """Scanner of an answer that has reasoning at its beginning, and calls between its texts."""

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
        self._calls = format.tools if tools is not None else None
        super().__init__(format, call_id if self._calls is None else self._calls.new_id)
        self._tools: Tools = tools or {}
        self._separate = separate_reasoning
        starts = () if self._calls is None else self._calls.starts
        self._start_texts = tuple(start for start in starts if format.markers[start].token is None)
        """Markers of calls that are no tokens."""
        self._start_pattern = re.compile("|".join(map(re.escape, self._start_texts)))
        self._gap: _Gap | None = None
        """Spaces around the calls since the last text; None: there was no call, or no text before it."""
        self._has_text = False
        self._is_fenced = False
        """The reasoning so far ends within a block of code."""
        self._ticks = ""
        """Backticks at its end that may begin the next marker of such a block."""
        self._begins_line = True
        """Nothing but spaces was taken since the last line break, the last call, or the beginning of the text."""
        self._closing = ""
        """Tag behind the text of the answer; empty: there is none."""
        self._begin(self._answer(state))

    def _answer(self, state: ReasoningState) -> Scan[None]:
        reasoning = self._format.reasoning
        lead = ""
        if reasoning is not None and state is not ReasoningState.BEHIND:
            start, end = self._format.markers[reasoning.start], self._format.markers[reasoning.end]
            is_open = yield from self._opens(start)
            if is_open and self._separate:
                yield from self._skip(reasoning.label)
            if is_open or state is ReasoningState.WITHIN or reasoning.is_forced:
                self.has_reasoning = self.in_reasoning = True
                yield from self._reasoning(end)
                self.in_reasoning = False
                self._begins_line = True
                lead = _LINE_BREAK if self._separate else ""
        if reasoning is not None and reasoning.answer_tags is not None and self._separate:
            yield from self._open_answer(*reasoning.answer_tags)
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

    def _skip(self, text: str, before: str = "") -> Scan[bool]:
        """Skip a text, and any of the characters `before` it; False: something else follows."""
        reader = self._reader
        while not (rest := reader.text.lstrip(before)).startswith(text):
            if reader.ended or not text.startswith(rest):
                return False
            yield
        reader.at = len(reader.text) - len(rest) + len(text)
        reader.commit()
        return True

    def _open_answer(self, opening: str, closing: str) -> Scan[None]:
        """Skip the tag before the text of the answer, if it is there."""
        if (yield from self._skip(opening, SPACE)):
            self._closing = closing
            yield from self._skip(_LINE_BREAK)

    def _reasoning(self, end: Marker) -> Scan[None]:
        """Pass on reasoning, and skip the marker that ends it; or stop before the calls that end it."""
        reader = self._reader
        around = _LINE_BREAK if self._separate else ""
        lead = around
        needles = self._start_texts if end.token is not None else (end.text, *self._start_texts)
        while True:
            reader.at = len(reader.text) - len(reader.text.lstrip(lead))
            reader.commit()
            if reader.text:
                lead = ""
            at = self._find(end)
            start = None if self._calls is None else self._next_start(self._calls, "")
            if self._calls is not None and start is not None and (at is None or start[0] < at):
                begin = len(reader.text[: start[0]].rstrip(SPACE))
                self._think(begin)
                if (yield from self._ends_reasoning(self._calls, (start[0] - begin, start[1] - begin), end)):
                    return
                continue
            if at is not None:
                behind = at + len(end.text)
                taken = len(reader.text[:at].rstrip(around)) if self._separate else behind
                self._think(taken)
                reader.at = behind - taken
                reader.commit()
                return
            if reader.ended:
                self._think(len(reader.text))
                return
            safe = held_suffix(reader.text, 0, needles)
            self._think(len(reader.text[:safe].rstrip(around if self._calls is None else SPACE)))
            yield

    def _think(self, end: int) -> None:
        """Pass on reasoning up to this position."""
        text = self._reader.take(end)
        if self._separate:
            self._output.reasoning(text)
        else:
            self._output.text(text)
            self._has_text = self._has_text or text != ""
        _, line_break, line = text.rpartition(_LINE_BREAK)
        self._begins_line = (self._begins_line or line_break != "") and not line.strip()
        ticks = self._ticks + text
        self._is_fenced ^= ticks.count(_FENCE) % 2 == 1
        self._ticks = "`" * ((len(ticks) - len(ticks.rstrip("`"))) % len(_FENCE))

    def _ends_reasoning(self, calls: ToolFormat, start: tuple[int, int], end: Marker) -> Scan[bool]:
        """Return whether calls of known tools begin with this marker in reasoning, and are the answer: nothing follows
        the reasoning. Within a line, nothing follows the calls either: they would be quotations. Takes the marker that
        ends the reasoning from calls that are the answer, and passes others on as reasoning."""
        reader = self._reader
        at, thought = start
        is_in_line = not (calls.is_inline or self._begins_line or _LINE_BREAK in reader.text[:at])
        is_code = is_in_line and not at and self._ticks != ""
        behind = None if self._is_fenced else (yield from self._behind_calls(calls, at))
        while behind is not None:
            found = self._find(end, behind)
            following = reader.text[len(reader.text) if found is None else found + len(end.text) :]
            if is_in_line:
                is_whole = found is not None or reader.ended or end.token is not None
                following += reader.text[behind : found if is_whole else held_suffix(reader.text, 0, (end.text,))]
            if is_code or following.strip():
                thought = max(thought, behind)
                self.in_reasoning = True
                break
            if reader.ended:
                reader.cut(found)
                return True
            yield
        self._think(thought)
        return False

    def _behind_calls(self, calls: ToolFormat, at: int) -> Scan[int | None]:
        """Return the position behind the calls of known tools that begin at this one; None: there are none. A call that
        is broken or cut is not passed. Takes nothing."""
        begin: int | None = at
        behind: int | None = None
        while begin is not None and (end := (yield from self._behind_call(calls, begin))) is not None:
            behind = end
            begin = None if end == begin else (yield from self._next_call(calls, end))
        return behind

    def _next_call(self, calls: ToolFormat, behind: int) -> Scan[int | None]:
        """Return the position of the marker of a call that follows but for spaces; None: something else does."""
        reader = self._reader
        while True:
            rest = reader.text[behind:].lstrip(SPACE)
            at = len(reader.text) - len(rest)
            if rest.startswith(self._start_texts) or any(
                mark.at == at and mark.marker.text in calls.starts for mark in reader.marks
            ):
                return at
            if reader.ended or (rest and not any(start.startswith(rest) for start in self._start_texts)):
                return None
            yield

    def _behind_call(self, calls: ToolFormat, begin: int) -> Scan[int | None]:
        """Return the position behind the call of a known tool that begins at this one; the same position if it is
        broken or cut, and None if it is none. Takes nothing."""
        reader = self._reader
        trial, output = Reader(reader.token_markers), Output(str)
        steps = calls.parse(trial, output, self._tools)
        read, is_known = begin, False
        while True:
            trial.follow(reader, read)
            read = len(reader.text)
            try:
                is_complete = next(steps, True) is True
            except (NotACall, Ended):
                return begin if is_known else None
            events = output.take()
            if not is_known and events:
                if not isinstance(first := events[0], ToolCallDelta) or first.name not in self._tools:
                    return None
                is_known, self.in_reasoning = True, False
            if is_complete:
                return read - (len(trial.text) - trial.at)
            yield

    def _text(self, lead: str) -> Scan[None]:
        """Pass on text, without the characters `lead` at its beginning."""
        reader = self._reader
        while True:
            if reader.ended:
                self._end_answer()
            end = len(reader.text)
            lead = self._emit(self._tail(end, is_open=True) if self._closing else end, lead)
            self.is_plain = not lead and not self._closing
            if reader.ended:
                return
            yield

    def _tail(self, end: int, *, is_open: bool) -> int:
        """Return the position from which on there is nothing before `end` but spaces and the tag that closes the
        answer; with `is_open`, also the beginning of one."""
        text = self._reader.text[:end].rstrip(SPACE)
        if self._closing and text.endswith(self._closing):
            text = text[: -len(self._closing)].rstrip(SPACE)
        elif self._closing and is_open:
            text = text[: held_suffix(text, 0, (self._closing,))].rstrip(SPACE)
        return len(text)

    def _end_answer(self) -> None:
        """Forget the tag that closes the answer, at its end."""
        if self._closing and self._reader.text.rstrip(SPACE).endswith(self._closing):
            self._reader.cut(self._tail(len(self._reader.text), is_open=False))
        self._closing = ""

    def _text_and_calls(self, lead: str, calls: ToolFormat) -> Scan[None]:
        """Pass on text, without the characters `lead` at its beginning, and calls. Spaces before a call are held,
        because they are left out."""
        reader, output = self._reader, self._output
        while True:
            start = self._next_start(calls, calls.bare)
            if start is None and reader.ended:
                self._end_answer()
                self._emit(len(reader.text), lead)
                return
            end = held_suffix(reader.text, 0, self._start_texts) if start is None else start[0]
            safe = self._tail(end, is_open=start is None)
            lead = self._emit(safe, lead)
            if start is None:
                yield
                continue
            begin, end = start[0] - safe, start[1] - safe
            spaces = reader.text[:begin].replace(self._closing, "")
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

    def _next_start(self, calls: ToolFormat, bare: str) -> tuple[int, int] | None:
        """Return begin and end of what may begin the next call, a marker or the character `bare`; None if nothing
        does."""
        reader = self._reader
        found = [
            (mark.at, mark.at + len(mark.marker.text)) for mark in reader.marks if mark.marker.text in calls.starts
        ]
        if self._start_texts and (match := self._start_pattern.search(reader.text)) is not None:
            found.append(match.span())
        at = reader.text.find(bare) if bare else -1
        while at >= 0:
            line = reader.text.rfind(_LINE_BREAK, 0, at) + 1
            if (line or self._begins_line) and not reader.text[line:at].strip():
                found.append((at, at + 1))
                break
            at = reader.text.find(bare, at + 1)
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

    def _find(self, marker: Marker, begin: int = 0) -> int | None:
        """Return the position of a marker. `begin`: before it, there is none."""
        if marker.token is None:
            at = self._reader.text.find(marker.text, begin)
            return at if at >= 0 else None
        return next((mark.at for mark in self._reader.marks if mark.at >= begin and mark.marker == marker), None)

    def _is_at(self, marker: Marker, at: int) -> bool:
        if marker.token is None:
            return self._reader.text.startswith(marker.text, at)
        return any(mark.at == at and mark.marker == marker for mark in self._reader.marks)
