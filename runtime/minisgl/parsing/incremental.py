"""What all scanners of answers have in common: they take text and markers as they are generated, and return events."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.output import Event, Output
from minisgl.parsing.reader import Marker, Reader, Scan


class IncrementalScanner:
    """Scanner of one answer. Give it text and markers as they are generated, then call `scan`. Its constructor calls
    `_begin` with the parser of the answer, a generator that reads `_reader` and writes `_output`."""

    def __init__(self, format: AnswerFormat, new_id: Callable[[], str]) -> None:
        """`new_id` returns identifiers of tool calls."""
        self._format = format
        self._reader = Reader(frozenset(marker.text for marker in format.by_token.values()))
        self._output = Output(new_id)
        self.is_plain = False
        """What is still to come is ordinary text: it need not be scanned."""
        self.has_reasoning = False
        """The answer has reasoning, which may have ended."""
        self.in_reasoning = False
        """The text that was scanned last is reasoning."""
        self.in_text = False
        """The text that was scanned last is not, and more reasoning may follow."""

    def _begin(self, scan: Scan[None]) -> None:
        self._scan = scan
        next(scan)

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

    def finish(self, *, is_cut: bool = False) -> None:
        """Note that nothing more will be added. `is_cut`: the model would have continued."""
        self._reader.ended = True
        self._reader.is_cut = is_cut

    def scan(self) -> list[Event]:
        """Return what is certain of the output by now, since the last call."""
        next(self._scan, None)
        return self._output.take()

    def abandon(self) -> list[Event]:
        """Return the output after `scan` has failed; what was not scanned is text."""
        self._reader.at = 0
        self._output.text(self._reader.take(len(self._reader.text)))
        return self._output.take()
