"""Input of custom tools, whose calls are functions with one argument, `input`, to the model.

A custom tool takes a text, not JSON. The text is taken out of the JSON of the arguments piece by piece, so that a long
input, such as a patch, is streamed.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

ARGUMENT: Final = "input"

_START: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STOP: Final = re.compile(r'["\\]')
_ESCAPES: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class CustomInput:
    """The text in the arguments of one call. The pieces that `push` and `finish` return are the input."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._rest = ""
        """Arguments that were not turned into text yet."""
        self._in_text = False
        self._is_complete = False
        """The text has ended. What follows it, such as a closing brace, is no input."""

    def push(self, piece: str) -> str:
        """Take the next piece of the arguments and return the text that it adds."""
        if self._is_complete:
            return ""
        self._rest += piece
        if not self._in_text:
            self._arguments.append(piece)
            start = _START.match(self._rest)
            if start is None:
                return ""
            self._in_text = True
            self._rest = self._rest[start.end() :]
        return self._text()

    def finish(self) -> str:
        """Return the text that remains: all of it if the arguments do not begin with the input, otherwise what was held
        back of an escape sequence that was cut off."""
        if self._in_text:
            return "\ufffd" if self._rest and not self._is_complete else ""
        return _whole("".join(self._arguments))

    def _text(self) -> str:
        text = []
        while (stop := _STOP.search(self._rest)) is not None:
            text.append(self._rest[: stop.start()])
            self._rest = self._rest[stop.start() :]
            if self._rest[0] == '"':
                self._is_complete = True
                return "".join(text)
            character, length = _unescape(self._rest)
            if not length:
                return "".join(text)
            text.append(character)
            self._rest = self._rest[length:]
        text.append(self._rest)
        self._rest = ""
        return "".join(text)


def _unescape(text: str) -> tuple[str, int]:
    """Return the character of the escape sequence that `text` begins with, and the sequence's length; 0: it is not
    complete yet."""
    kind = text[1:2]
    if kind != "u":
        return (_ESCAPES.get(kind, kind), 2) if kind else ("", 0)
    if len(text) < 6:
        return "", 0
    code = _code_unit(text)
    if not 0xD800 <= code <= 0xDBFF:
        return ("\ufffd" if 0xDC00 <= code <= 0xDFFF else chr(code)), 6
    # The first half of a character beyond the first plane.
    if not "\\u".startswith(text[6:8]):
        return "\ufffd", 6
    if len(text) < 12:
        return "", 0
    low = _code_unit(text[6:])
    if not 0xDC00 <= low <= 0xDFFF:
        return "\ufffd", 6
    return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12


def _code_unit(text: str) -> int:
    try:
        return int(text[2:6], 16)
    except ValueError:
        return 0xDC00


def _whole(arguments: str) -> str:
    """Return the input of arguments that do not begin with it."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get(ARGUMENT), str):
        text: str = value[ARGUMENT]
        return text
    return value if isinstance(value, str) else arguments
