"""JSON that a model generates, read piece by piece. It may be wrong or end anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from minisgl.parsing.reader import Ended, NotACall, Reader, Scan

SPACE: Final = " \t\r\n"

_OUTSIDE_STRINGS: Final = re.compile(r"""["'{}\[\]]|[^\s\w+\-.,:"'{}\[\]]""")
"""Characters that matter outside of strings: brackets, quotes, and those that no JSON text has there."""
_INSIDE_STRINGS: Final = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
"""Characters that matter within strings that begin with a quote. Models write Python's quotes, too."""
_BEFORE_STRINGS: Final = "{[,:"
_SCALAR: Final = re.compile(r"[\w+\-.]*")
_STRING_PART: Final = {
    quote: re.compile(
        rf"""(?:[^{quote}\\]|\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{{4}}"""
        r"""|u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))))*"""
    )
    for quote in _INSIDE_STRINGS
}
"""Whole characters of a string by its quote. A surrogate pair is one; a half that has no other half is one too."""
_TOKENS: Final = {
    "": re.compile(r"""["',]|[^\W\d]\w*"""),
    '"': re.compile(r'["\\\x00-\x1f]'),
    "'": re.compile(r"""['"\\\x00-\x1f]"""),
}
"""What a repair looks at, outside of strings and within those that begin with a quote."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SPACES: Final = re.compile(f"[{SPACE}]*")
_WORD_END: Final = re.compile(r"\w*")
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}


class Repair:
    """Writes a JSON text that arrives in pieces as strict readers take it, where it is certain what the model means:
    raw control characters in strings, a comma before a closing bracket, quotes and constants of Python. Anything else
    stays as it is."""

    def __init__(self) -> None:
        self._quote = ""
        """That of the string at the end of the text so far; empty: it is outside of strings."""
        self._comma: list[str] = []
        """A comma and the spaces behind it: what follows decides whether it stays."""
        self._held = ""
        """The beginning of a constant, or a backslash within a string."""
        self._in_word = False
        """The text so far ends within a word that is no constant."""
        self._last = ""
        """The last character of the text so far that is no space."""

    def push(self, text: str) -> str:
        """Return the next piece of the text."""
        if self._held:
            text, self._held = self._held + text, ""
        elif self._quote and _TOKENS[self._quote].search(text) is None:
            return text
        pieces: list[str] = []
        begin = at = 0
        while at < len(text):
            if self._comma:
                at = _end(_SPACES, text, at)
                self._comma.append(text[begin:at])
                begin = at
                if at < len(text):
                    pieces += self._comma[1:] if text[at] in "]}" else self._comma
                    self._comma = []
            elif self._in_word:
                at = _end(_WORD_END, text, at)
                self._in_word = at == len(text)
            elif (found := _TOKENS[self._quote].search(text, at)) is None:
                break
            else:
                at = found.end()
                meant = self._meant(found[0], text, at)
                if meant is None:
                    self._held = found[0]
                    text = text[: found.start()]
                elif meant != found[0]:
                    at += found[0] == "\\"
                    pieces += [text[begin : found.start()], meant]
                    begin = at
                elif found[0] == "\\":
                    at += 1
        self._last = _before(text, len(text)) or self._last
        return "".join([*pieces, text[begin:]])

    def finish(self) -> str:
        """Return what is held at the end of the text."""
        return "".join([*self._comma, _CONSTANTS.get(self._held, self._held)])

    def _meant(self, token: str, text: str, end: int) -> str | None:
        """Return what a token that ends at this position stands for, a backslash with the character behind it. None:
        what has not arrived decides."""
        if not self._quote:
            if token == ",":
                if (_before(text, end - 1) or self._last) in ("[", "{"):
                    # A value is missing, and nobody knows which.
                    return token
                self._comma = [token]
                return ""
            if token in ("'", '"'):
                self._quote = token
                return '"'
            if end < len(text):
                return _CONSTANTS.get(token, token)
            if any(constant.startswith(token) for constant in _CONSTANTS):
                return None
            self._in_word = True
            return token
        if token == "\\":
            match text[end : end + 1]:
                case "":
                    return None
                case "'":
                    return "'"
                case control if control < " ":
                    # The backslash is meant as it is, like that before a line break in a shell's command.
                    return "\\\\" + escaped(control)
            return token
        if token == self._quote:
            self._quote = ""
            return '"'
        return escaped(token)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of what a pattern, which may match nothing, matches at a position."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _before(text: str, end: int) -> str:
    """Return the last character before a position that is no space; empty if there is none."""
    while end and text[end - 1].isspace():
        end -= 1
    return text[end - 1 : end]


def repaired(text: str) -> str:
    """Return a whole JSON text as `Repair` writes it."""
    repair = Repair()
    return repair.push(text) + repair.finish()


def escaped(text: str) -> str:
    """Return the text as it stands within a JSON string."""
    # A half of a surrogate pair cannot be encoded in UTF-8; escaped, it meets its other half.
    is_plain = not any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(text, ensure_ascii=not is_plain)[1:-1]


def decoded(raw: str, quote: str) -> str:
    """Return the text of what stands between the quotes of a JSON string. Raises ValueError."""
    return _loaded(raw, quote).encode("utf-8", "replace").decode()


def _loaded(raw: str, quote: str) -> str:
    """Return the same text, which may have halves of surrogate pairs. Raises ValueError."""
    text: str = json.loads(repaired(f"{quote}{raw}{quote}"))
    return text


def string(reader: Reader) -> Scan[str]:
    """Return the text of the string that begins at the position. Raises NotACall, Ended."""
    quote = yield from _quote(reader)
    begin = reader.at
    while True:
        found = _INSIDE_STRINGS[quote].search(reader.text, reader.at)
        if found is None:
            reader.at = len(reader.text)
            yield from reader.peek()
        elif found[0] == quote:
            break
        else:
            reader.at = found.start() + 1
            yield from reader.peek()
            reader.at += 1
    end, reader.at = found.start(), found.end()
    try:
        return decoded(reader.text[begin:end], quote)
    except ValueError:
        raise NotACall from None


def _quote(reader: Reader) -> Scan[str]:
    """Skip the quote that begins a string, and return it. Raises NotACall, Ended."""
    quote = yield from reader.peek()
    if quote not in _INSIDE_STRINGS:
        raise NotACall
    reader.at += 1
    return quote


def value(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the text of the value at the position to `emit`, as it arrives. It ends before a character that no JSON text
    has. Raises NotACall if no value begins here, and Ended if it is incomplete."""
    first = yield from reader.peek()
    if first not in "{[\"'":
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
    quote, is_escaped = "", False
    before = ":"
    """The last character of earlier pieces that is no space."""
    while True:
        begin, text = reader.at, reader.text
        at, is_complete = begin, False
        while at < len(text) and not is_complete:
            if is_escaped:
                is_escaped = False
                at += 1
                continue
            found = (_INSIDE_STRINGS[quote] if quote else _OUTSIDE_STRINGS).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            match found[0]:
                case "\\" if quote:
                    is_escaped = True
                case _ if quote:
                    quote = ""
                    is_complete = not depth
                case '"':
                    quote = '"'
                case "'" if (_last(text, begin, found.start()) or before) in _BEFORE_STRINGS:
                    quote = "'"
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                    is_complete = not depth
                case _:
                    at = found.start()
                    is_complete = True
        before = quote or _last(text, begin, at) or before
        reader.at = at
        emit(text[begin:at])
        if is_complete:
            return
        if reader.ended:
            raise Ended
        yield


def _last(text: str, begin: int, end: int) -> str:
    """Return the last character between two positions that is no space; empty: there is none."""
    while end > begin and text[end - 1] in SPACE:
        end -= 1
    return text[end - 1 : end] if end > begin else ""


def string_value(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the decoded text of the string at the position to `emit`, as it arrives. Raises NotACall, Ended."""
    quote = yield from _quote(reader)
    while True:
        found = _STRING_PART[quote].match(reader.text, reader.at)
        assert found is not None, "it matches nothing too"
        reader.at = found.end()
        emit(_decoded_part(found[0], quote))
        rest = reader.text[reader.at :]
        if rest.startswith(quote):
            reader.at += 1
            return
        if len(rest) >= _LONGEST_ESCAPE:
            raise NotACall
        if reader.ended:
            raise Ended
        yield


_LONGEST_ESCAPE: Final = len("\\ud83d\\ude00")


def _decoded_part(raw: str, quote: str) -> str:
    try:
        # A half of a surrogate pair is no character; in the JSON text that the string contains, it can be escaped.
        return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", _loaded(raw, quote))
    except ValueError:
        # An escape that JSON does not have.
        return raw
