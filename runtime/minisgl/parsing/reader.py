"""The text of an answer as parsers read it: it arrives in pieces, and parsers wait for more.

Parsers are generators. They `yield` when they need text that has not arrived, and are resumed when there is some, or
when the answer has ended. What they do depends only on the text, never on how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import NamedTuple, TypeVar

import msgspec


class Marker(msgspec.Struct, frozen=True):
    """A text that separates the parts of an answer, such as `<tool_call>`."""

    text: str
    token: int | None
    """Its token, if the vocabulary has it as a single one. Then only this token is the marker, and the same text of
    other tokens is ordinary text, such as a quotation."""


T = TypeVar("T")
Scan = Generator[None, None, T]
"""A parser that returns T."""


class Ended(Exception):
    """The answer ended where a parser needs more text."""


class NotACall(Exception):
    """The text does not continue as a tool call."""


class Mark(NamedTuple):
    """A marker that arrived as a token."""

    at: int
    """Position of its text in `Reader.text`."""
    marker: Marker
    is_visible: bool
    """Its text is part of the answer's text; false for special tokens."""


class Reader:
    """Text that was not taken yet, and the position of the parser in it.

    Positions are indexes of `text`, and become invalid when text is taken from its beginning (`take`, `commit`).
    """

    def __init__(self, token_markers: frozenset[str] = frozenset()) -> None:
        """`token_markers`: texts of the markers that arrive as tokens."""
        self.token_markers = token_markers
        self.text = ""
        self.at = 0
        self.ended = False
        """No more text will arrive."""
        self.is_cut = False
        """It has ended where the model would have continued, as at a limit of tokens."""
        self.marks: list[Mark] = []
        """Marks in the text, in the order of their positions."""

    def follow(self, other: Reader, begin: int) -> None:
        """Append what another reader has from a position on, and its end."""
        self.marks += [mark._replace(at=mark.at - begin + len(self.text)) for mark in other.marks if mark.at >= begin]
        self.text += other.text[begin:]
        self.ended, self.is_cut = other.ended, other.is_cut

    def push(self, text: str) -> None:
        """Append text of ordinary tokens."""
        self.text += text

    def push_marker(self, marker: Marker, is_visible: bool) -> None:
        """Append a marker that arrived as a token."""
        self.marks.append(Mark(len(self.text), marker, is_visible))
        self.text += marker.text

    def commit(self) -> None:
        """Forget all text before the position: nobody will return to it."""
        if at := self.at:
            self.text = self.text[at:]
            if self.marks:
                self.marks = [mark._replace(at=mark.at - at) for mark in self.marks if mark.at >= at]
            self.at = 0

    def take(self, end: int) -> str:
        """Take the text from the position to `end`, as the client would see it without parsers."""
        text = self.text[self.at : end]
        for mark in reversed(self.marks):
            if self.at <= mark.at < end and not mark.is_visible:
                begin = mark.at - self.at
                text = text[:begin] + text[begin + len(mark.marker.text) :]
        self.at = end
        self.commit()
        return text

    def cut(self, end: int | None) -> None:
        """Forget the text from `end` on; None: nothing."""
        if end is not None:
            self.text = self.text[:end]
            self.marks = [mark for mark in self.marks if mark.at < end]

    def is_token(self, marker: str) -> bool:
        """Return whether a marker arrives as a token."""
        return marker in self.token_markers

    def next_marker(self, texts: Collection[str], begin: int) -> tuple[int, str] | None:
        """Return position and text of the first of these markers at or behind `begin`; None: none has arrived."""
        found = [(mark.at, mark.marker.text) for mark in self.marks if mark.at >= begin and mark.marker.text in texts]
        for text in texts:
            if text not in self.token_markers and (at := self.text.find(text, begin)) >= 0:
                found.append((at, text))
        return min(found, default=None)

    def certain_end(self, texts: Collection[str], begin: int) -> int:
        """Return the position from which on the text may be the beginning of one of these markers; its end if it
        cannot."""
        return held_suffix(self.text, begin, tuple(text for text in texts if text not in self.token_markers))

    def is_quoted(self, marker: str) -> bool:
        """Return whether the marker at the position is ordinary text, and would be a token otherwise."""
        return self.is_token(marker) and all(mark.at != self.at for mark in self.marks)

    def peek(self) -> Scan[str]:
        """Return the next character. Raises Ended."""
        while self.at >= len(self.text):
            if self.ended:
                raise Ended
            yield
        return self.text[self.at]

    def skip(self, characters: str) -> Scan[str]:
        """Skip any number of these characters and return the first other one. Raises Ended."""
        while (character := (yield from self.peek())) in characters:
            self.at += 1
        return character

    def expect(self, character: str) -> Scan[None]:
        """Skip this character. Raises NotACall for another one, and Ended."""
        if (yield from self.peek()) != character:
            raise NotACall
        self.at += 1

    def skip_text(self, text: str) -> Scan[bool]:
        """Skip this text; False: another one follows. Raises Ended if the answer ends within it."""
        while not self.text.startswith(text, self.at):
            if not text.startswith(self.text[self.at :]):
                return False
            if self.ended:
                raise Ended
            yield
        self.at += len(text)
        return True

    def match(self, pattern: re.Pattern[str]) -> Scan[str]:
        """Skip what the pattern matches, and return it. The pattern must match a single character at a time, repeated:
        what follows the last one in the text that has arrived decides that it is complete. Raises Ended."""
        end = self.at
        while True:
            found = pattern.match(self.text, end)
            end = found.end() if found else end
            if end < len(self.text):
                break
            if self.ended:
                raise Ended
            yield
        matched, self.at = self.text[self.at : end], end
        return matched

    def skip_end(self, text: str, before: str) -> Scan[None]:
        """Skip this text, or as much of it as there is at the answer's end, with any of the characters `before` it; if
        another text follows, nothing."""
        while True:
            rest = self.text[self.at :].lstrip(before)
            if rest.startswith(text):
                self.at = len(self.text) - len(rest) + len(text)
                return
            if not text.startswith(rest):
                return
            if self.ended:
                self.at = len(self.text)
                return
            yield

    def skip_ends(self, text: str, before: str) -> Scan[None]:
        """Skip this text as `skip_end` does, as often as it is repeated."""
        begin = -1
        while self.at != begin:
            begin = self.at
            yield from self.skip_end(text, before)

    def skip_to(self, starts: tuple[str, ...], before: str) -> Scan[bool]:
        """Skip any of the characters `before` one of the starts, and return True; if none of them follows, skip
        nothing."""
        while True:
            rest = self.text[self.at :].lstrip(before)
            if rest.startswith(starts):
                self.at = len(self.text) - len(rest)
                return True
            if self.ended or not any(start.startswith(rest) for start in starts):
                return False
            yield


def held_suffix(text: str, begin: int, needles: tuple[str, ...]) -> int:
    """Return the position from which on `text` may be the beginning of a needle; its length if it cannot."""
    end = len(text)
    longest = max(map(len, needles), default=0)
    for at in range(max(begin, end - longest + 1), end):
        if any(needle.startswith(text[at:]) for needle in needles):
            return at
    return end
