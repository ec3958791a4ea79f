"""JSON that a model generates, read piece by piece. It may be wrong or end anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from minisgl.parsing.reader import Ended, NotACall, Reader, Scan

SPACE: Final = " \t\r\n"

_OUTSIDE_STRINGS: Final = re.compile(r"""["{}\[\]]|[^\s\w+\-.,:"{}\[\]]""")
"""Characters that matter outside of strings: brackets, quotes, and those that no JSON text has there."""
_INSIDE_STRINGS: Final = re.compile(r'["\\]')
_SCALAR: Final = re.compile(r"[\w+\-.]*")
_STRING_PART: Final = re.compile(
    r"""(?:[^"\\]|\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"""|u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))))*"""
)
"""Whole characters of a string. A surrogate pair is one; a half that has no other half is one too."""


_QUOTES: Final = {
    "": re.compile(r"""["'\\]"""),
    '"': re.compile(r'["\\\x00-\x1f]'),
    "'": re.compile(r"['\\\x00-\x1f]"),
}
"""Characters that matter outside of strings, and within those that begin with a quote."""


class ControlCharacters:
    """Escapes the raw control characters in strings of a JSON text or Python literal that arrives in pieces. Models
    write line breaks of files and commands as they are, which no strict reader takes."""

    def __init__(self, quotes: str = '"') -> None:
        """`quotes`: characters that begin a string and end it."""
        self._quotes = quotes
        self._quote = ""
        """That of the string at the end of the text so far; empty: it is outside of strings."""
        self._is_escaped = False

    def escaped(self, text: str) -> str:
        """Return the next piece of the text."""
        pieces: list[str] = []
        begin = at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                if text[at] < " ":
                    # The backslash is meant as it is, like that before a line break in a shell's command.
                    pieces += [text[begin:at], "\\", escaped(text[at])]
                    begin = at + 1
                at += 1
                continue
            found = _QUOTES[self._quote].search(text, at)
            if found is None:
                break
            at = found.end()
            if found[0] < " ":
                pieces += [text[begin : found.start()], escaped(found[0])]
                begin = at
            elif found[0] == "\\":
                self._is_escaped = self._quote != ""
            elif self._quote or found[0] in self._quotes:
                self._quote = "" if self._quote else found[0]
        return "".join([*pieces, text[begin:]])


def escaped(text: str) -> str:
    """Return the text as it stands within a JSON string."""
    # A half of a surrogate pair cannot be encoded in UTF-8; escaped, it meets its other half.
    is_plain = not any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(text, ensure_ascii=not is_plain)[1:-1]


def decoded(raw: str) -> str:
    """Return the text of what stands between the quotes of a JSON string. Raises ValueError."""
    text: str = json.loads(f'"{raw}"', strict=False)
    return text.encode("utf-8", "replace").decode()


def string(reader: Reader) -> Scan[str]:
    """Return the text of the string that begins at the position. Raises NotACall, Ended."""
    yield from reader.expect('"')
    begin = reader.at
    while True:
        found = _INSIDE_STRINGS.search(reader.text, reader.at)
        if found is None:
            reader.at = len(reader.text)
            yield from reader.peek()
        elif found[0] == '"':
            break
        else:
            reader.at = found.start() + 1
            yield from reader.peek()
            reader.at += 1
    end, reader.at = found.start(), found.end()
    try:
        return decoded(reader.text[begin:end])
    except ValueError:
        raise NotACall from None


def value(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the text of the value at the position to `emit`, as it arrives. It ends before a character that no JSON text
    has. Raises NotACall if no value begins here, and Ended if it is incomplete."""
    first = yield from reader.peek()
    if first not in '{["':
        begin = reader.at
        try:
            scalar = yield from reader.match(_SCALAR)
        except Ended:
            emit(reader.text[begin:])
            raise
        if not scalar:
            raise NotACall
        emit(scalar)
        return
    depth = 0
    in_string = is_escaped = False
    while True:
        begin, text = reader.at, reader.text
        at, is_complete = begin, False
        while at < len(text) and not is_complete:
            if is_escaped:
                is_escaped = False
                at += 1
                continue
            found = (_INSIDE_STRINGS if in_string else _OUTSIDE_STRINGS).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            match found[0]:
                case '"':
                    in_string = not in_string
                    is_complete = not in_string and not depth
                case "\\" if in_string:
                    is_escaped = True
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                    is_complete = not depth
                case _:
                    at = found.start()
                    is_complete = True
        reader.at = at
        emit(text[begin:at])
        if is_complete:
            return
        if reader.ended:
            raise Ended
        yield


def string_value(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the decoded text of the string at the position to `emit`, as it arrives. Raises NotACall, Ended."""
    yield from reader.expect('"')
    while True:
        found = _STRING_PART.match(reader.text, reader.at)
        assert found is not None, "it matches nothing too"
        reader.at = found.end()
        emit(_decoded_part(found[0]))
        rest = reader.text[reader.at :]
        if rest.startswith('"'):
            reader.at += 1
            return
        if len(rest) >= _LONGEST_ESCAPE:
            raise NotACall
        if reader.ended:
            raise Ended
        yield


_LONGEST_ESCAPE: Final = len("\\ud83d\\ude00")


def _decoded_part(raw: str) -> str:
    try:
        return decoded(raw)
    except ValueError:
        # An escape that JSON does not have.
        return raw
