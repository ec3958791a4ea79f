"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,list:[1,true],object:{key:2}}<tool_call|>`.

Names have no quotes, and texts stand between markers of their own. A text is passed on as it arrives, any other value
when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from minisgl.parsing import json_text
from minisgl.parsing.json_text import SPACE, escaped
from minisgl.parsing.output import Call, Output
from minisgl.parsing.python_text import json_value, python_literal
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan, held_suffix
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<|tool_call>"
END: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
CALL: Final = "call:"
_NAME: Final = re.compile(r"[\w.\-]*")
_KEY: Final = re.compile(r'[^:,{}\[\]<"\n]*')
_SCALAR: Final = re.compile(r"[^,{}\[\]<]*")
_Emit: TypeAlias = Callable[[str], None]
_MAX_DEPTH: Final = 64
"""Depth of objects and lists; what is nested deeper is no value."""


def _parse(reader: Reader, output: Output, _: Tools) -> Scan[None]:
    while (yield from reader.skip_text(START)):
        yield from reader.skip(SPACE)
    yield from reader.skip_text(CALL)
    name = yield from reader.match(_NAME)
    if not name or (yield from reader.skip(SPACE)) != "{":
        raise NotACall
    call = Call(output)
    call.begin(name)
    reader.commit()
    try:
        yield from _Values(reader, call).value(0)
    except NotACall:
        reader.at = 0
    call.end()
    yield from reader.skip_ends(END, SPACE)


def can_be_key(name: str) -> bool:
    """Return whether a parameter can have this name: it is read as it is written."""
    return name != "" and _KEY.fullmatch(name) is not None and name == name.strip()


class _Values:
    """Passes on values as JSON. Its parsers raise NotACall and Ended."""

    def __init__(self, reader: Reader, call: Call) -> None:
        self._reader = reader
        self._call = call

    def value(self, depth: int) -> Scan[None]:
        reader = self._reader
        first = yield from reader.skip(SPACE)
        if first in "{[":
            if depth == _MAX_DEPTH:
                raise NotACall
            reader.at += 1
            yield from self._items(first, depth)
        elif (yield from self._skip_quote()):
            self._emit('"')
            yield from self._text(lambda text: self._emit(escaped(text)))
            self._emit('"')
        elif first == '"':
            # Small models write JSON's quotes, too.
            self._emit('"')
            yield from json_text.string_value(reader, lambda text: self._emit(escaped(text)))
            self._emit('"')
        else:
            yield from self._scalar()

    def _items(self, bracket: str, depth: int) -> Scan[None]:
        """Pass on the object or list behind its bracket."""
        closing = "}" if bracket == "{" else "]"
        self._emit(bracket)
        try:
            yield from self._until(closing, depth)
        except NotACall:
            # What has arrived of it is a value, also where something else follows.
            self._call.arguments(closing)
            raise
        self._emit(closing)

    def _until(self, closing: str, depth: int) -> Scan[None]:
        reader = self._reader
        before = ""
        while (following := (yield from reader.skip(SPACE))) != closing:
            if before:
                if following != ",":
                    raise NotACall
                reader.at += 1
                if (yield from reader.skip(SPACE)) == closing:
                    break
            key = f'"{escaped((yield from self._key()))}": ' if closing == "}" else ""
            self._emit(before + key)
            before = ", "
            yield from self.value(depth + 1)
        reader.at += 1

    def _key(self) -> Scan[str]:
        """Return the name of a parameter, and skip what is between it and its value."""
        reader = self._reader
        if (yield from self._skip_quote()):
            pieces: list[str] = []
            yield from self._text(pieces.append)
            key = "".join(pieces)
        elif (yield from reader.peek()) == '"':
            key = yield from json_text.string(reader)
        else:
            key = (yield from reader.match(_KEY)).strip()
        yield from reader.skip(SPACE)
        yield from reader.expect(":")
        if not key:
            raise NotACall
        return key

    def _scalar(self) -> Scan[None]:
        reader = self._reader
        begin = reader.at
        try:
            text = (yield from reader.match(_SCALAR)).strip()
        except Ended:
            self._call.arguments(reader.text[begin:])
            raise
        if not text:
            raise NotACall
        literal = json_value(text) or python_literal(text)
        self._emit(f'"{escaped(text)}"' if literal is None else literal.text)

    def _skip_quote(self) -> Scan[bool]:
        """Skip the marker around texts; False: something else follows."""
        reader = self._reader
        if not reader.is_token(QUOTE):
            return (yield from reader.skip_text(QUOTE))
        yield from reader.peek()
        if reader.is_quoted(QUOTE) or not reader.text.startswith(QUOTE, reader.at):
            return False
        reader.at += len(QUOTE)
        return True

    def _text(self, emit: _Emit) -> Scan[None]:
        """Pass on the text behind its first marker, and skip the second one."""
        reader = self._reader
        while True:
            begin = reader.at
            end, is_complete = self._end_of_text()
            reader.at = end + len(QUOTE) * is_complete
            emit(reader.text[begin:end])
            if is_complete:
                return
            if reader.ended:
                raise Ended
            yield

    def _end_of_text(self) -> tuple[int, bool]:
        """Return the position up to which the text at the position is certain, and whether the marker of its end is
        there."""
        reader = self._reader
        if reader.is_token(QUOTE):
            marks = (mark.at for mark in reader.marks if mark.at >= reader.at and mark.marker.text == QUOTE)
            at = next(marks, None)
            return (len(reader.text), False) if at is None else (at, True)
        at = reader.text.find(QUOTE, reader.at)
        return (held_suffix(reader.text, reader.at, (QUOTE,)), False) if at < 0 else (at, True)

    def _emit(self, text: str) -> None:
        self._call.arguments(text)
        self._reader.commit()


GEMMA: Final = ToolFormat("gemma4", (START,), _parse, (END, QUOTE))
