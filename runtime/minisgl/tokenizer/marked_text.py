"""Markers in a text of which a part may be held back, because it could become a stop string."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from minisgl.parsing.incremental import IncrementalScanner
from minisgl.parsing.reader import Marker


class _Mark(NamedTuple):
    marker: Marker
    begin: int
    end: int
    """Position in the answer's text; that of a special token is empty."""


class MarkedText:
    """Remembers where markers are, until the text with them is passed on. Positions count the characters of the
    answer, as the detokenizer returns them."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._length = 0
        """Characters of all tokens."""
        self._passed = 0
        """Characters that were passed on."""
        self._waiting = ""
        """Text that was released but not passed on: the beginning of a marker, whose rest is held back."""

    @property
    def is_empty(self) -> bool:
        """Nothing is waiting."""
        return not self._marks and not self._waiting

    def add_marker(self, marker: Marker, piece: str) -> None:
        """Note that the next piece of the text ends with a marker; the piece of a special token does not show it."""
        end = self._length + len(piece)
        self._marks.append(_Mark(marker, end - len(marker.text) if piece.endswith(marker.text) else end, end))

    def add(self, characters: int) -> None:
        """Count the characters of a piece."""
        self._length += characters

    def pass_on(self, text: str, scanner: IncrementalScanner, *, is_end: bool) -> None:
        """Give released text with its markers to the scanner. With `is_end` the rest of a marker never comes."""
        self._waiting += text
        while self._marks:
            marker, begin, end = self._marks[0]
            if end > self._passed + len(self._waiting):
                self._pass(scanner, len(self._waiting) if is_end else begin - self._passed)
                return
            self._pass(scanner, begin - self._passed)
            scanner.push_marker(marker, is_visible=begin < end)
            self._waiting = self._waiting[end - begin :]
            self._passed = end
            self._marks.popleft()
        self._pass(scanner, len(self._waiting))

    def rest(self) -> str:
        """Take the text that is waiting."""
        rest, self._waiting = self._waiting, ""
        return rest

    def _pass(self, scanner: IncrementalScanner, characters: int) -> None:
        scanner.push(self._waiting[:characters])
        self._passed += len(self._waiting[:characters])
        self._waiting = self._waiting[characters:]
