r"""Regular expressions of schemas and requests, as ones of Rust.

The dialects differ in classes: `\d` is ASCII in ECMAScript and Unicode in Python, and `&&` within brackets means an
intersection in Rust alone. The result matches only what all of them match, so that every validator accepts an answer.
"""

from __future__ import annotations

from typing import Final

from minisgl.errors import GrammarError
from minisgl.grammar.schema.refusals import MAX_PATTERN
from minisgl.grammar.schema.values import is_writable

_NARROW: Final = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r" \t\n\r\f\x0b",
    "D": r"[^\p{Nd}]",
    "W": r"[^\w\p{L}\p{N}]",
    "S": r"[^\s\x1c-\x1f\u{FEFF}]",
}
"""Members of a class that all dialects agree to contain."""
_WIDE: Final = {
    "d": r"\p{Nd}",
    "w": r"\w\p{L}\p{N}",
    "s": r"\s\x1c-\x1f\u{FEFF}",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^ \t\n\r\f\x0b]",
}
"""Members of a class that any dialect takes to contain."""
_DOT: Final = r"[^\n\r\u{2028}\u{2029}]"
_CONTROL: Final = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\x0b", "0": r"\x00"}
_CANNOT_WRITE: Final = "needs a control character that an answer cannot contain"
_HEXADECIMAL: Final = frozenset("0123456789abcdefABCDEF")


def translate(pattern: str, *, of_schema: bool) -> str:
    """Return the expression. `of_schema`: without flags, which validators of schemas do not agree on. Raises
    GrammarError `unsupported_schema` or `invalid_grammar`."""
    code = "unsupported_schema" if of_schema else "invalid_grammar"
    if len(pattern) > MAX_PATTERN:
        raise GrammarError("grammar_too_complex", f"the regular expression has more than {MAX_PATTERN} characters")
    try:
        return _Translator(pattern, of_schema).expression()
    except _Refused as refused:
        raise GrammarError(code, f"the regular expression {_shown(pattern)} {refused}") from None


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= 80 else pattern[:80] + "…"


class _Refused(Exception):
    """The text continues "the regular expression … "."""


class _Translator:
    def __init__(self, pattern: str, of_schema: bool) -> None:
        self._text = pattern
        self._at = 0
        self._of_schema = of_schema
        self._open_groups = 0

    def expression(self) -> str:
        parts: list[str] = []
        can_repeat = False
        while self._at < len(self._text):
            character = self._take()
            match character:
                case "\\":
                    part = self._escape()
                case "[":
                    part = self._brackets()
                case "(":
                    part = self._group()
                case ")":
                    self._open_groups -= 1
                    if self._open_groups < 0:
                        raise _Refused("has a `)` without a `(`")
                    part = ")"
                case ".":
                    part = _DOT if self._of_schema else "."
                case "*" | "+" | "?":
                    part = self._repetition(character, can_repeat)
                case "{" if (bounds := self._bounds()) is not None:
                    part = self._repetition(bounds, can_repeat)
                case "^" | "$" | "|":
                    part = character
                case _:
                    part = _literal(character)
            if self._of_schema and _is_unwritable(part):
                raise _Refused(_CANNOT_WRITE)
            can_repeat = part[:1] not in ("*", "+", "?", "{", "^", "$", "|") and not part.startswith("(")
            parts.append(part)
        if self._open_groups:
            raise _Refused("has a `(` without a `)`")
        return "".join(parts)

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise _Refused("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, prefix: str) -> bool:
        if not self._text.startswith(prefix, self._at):
            return False
        self._at += len(prefix)
        return True

    def _repetition(self, operator: str, can_repeat: bool) -> str:
        if not can_repeat:
            raise _Refused(f"repeats nothing with `{operator}`")
        if self._skip("+"):
            raise _Refused("has a possessive repetition, which is not supported")
        self._skip("?")  # which of several matches is found does not matter
        return operator

    def _bounds(self) -> str | None:
        """Return the repetition that begins behind `{`, or None where the brace is a plain character."""
        if self._text.startswith(",", self._at):
            raise _Refused("has `{,`, which dialects understand differently; write `{0,`")
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at : max(end, self._at)].partition(",")
        if not least.isascii() or not least.isdigit() or (most and not (most.isascii() and most.isdigit())):
            return None
        self._at = end + 1
        return "{" + least + comma + most + "}"

    def _group(self) -> str:
        self._open_groups += 1
        if not self._skip("?"):
            return "(?:"
        if self._skip(":"):
            return "(?:"
        looks_back = self._text.startswith(("<=", "<!"), self._at)
        if self._skip("P<") or (not looks_back and self._skip("<")):
            end = self._text.find(">", self._at)
            if end < 0:
                raise _Refused("has a group whose name does not end")
            self._at = end + 1
            return "(?:"
        flags = ""
        while self._at < len(self._text) and self._text[self._at] in "ims-":
            flags += self._take()
        if not self._of_schema and flags and (self._skip(":") or self._text[self._at : self._at + 1] == ")"):
            return f"(?{flags}" + (":" if self._text[self._at - 1] == ":" else "")
        raise _Refused("looks around, or has flags, which is not supported")

    def _escape(self) -> str:
        character = self._take()
        if character in _NARROW:
            narrow = _NARROW[character]
            return narrow if narrow.startswith("[") else f"[{narrow}]"
        if character in "pP":
            return "\\" + character + self._property()
        if character in "AZz" and not self._of_schema:
            return "^" if character == "A" else "$"
        if character in "bB":
            raise _Refused("has a word boundary, which is not supported")
        if character in "123456789k":
            raise _Refused("has a back reference, which is not supported")
        return self._character_escape(character)

    def _character_escape(self, character: str) -> str:
        """Return the escape of one character, of which the letter behind the backslash was taken."""
        if character in _CONTROL:
            return _CONTROL[character]
        if character in "xu":
            if character == "u" and self._skip("{"):
                end = self._text.find("}", self._at)
                digits = self._text[self._at : max(end, self._at)]
                self._at = end + 1
            else:
                width = 2 if character == "x" else 4
                digits = self._text[self._at : self._at + width]
                self._at += width if len(digits) == width else 0
                digits = digits if len(digits) == width else ""
            if not digits or len(digits) > 6 or not _HEXADECIMAL.issuperset(digits):
                raise _Refused(f"has an incomplete escape `\\{character}`")
            code = int(digits, 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise _Refused("has an escape that is no character; write the character itself")
            return _literal(chr(code))
        if character == "c" and self._at < len(self._text) and self._text[self._at].isascii():
            return _literal(chr(ord(self._take()) % 32))
        if character.isalnum():
            raise _Refused(f"has the escape `\\{character}`, which is not supported")
        return _literal(character)

    def _property(self) -> str:
        end = self._text.find("}", self._at)
        if not self._text.startswith("{", self._at) or end < 0:
            raise _Refused(r"has an incomplete escape `\p`")
        start, self._at = self._at, end + 1
        return self._text[start : self._at]

    def _brackets(self) -> str:
        negated = self._skip("^")
        if self._text.startswith("]", self._at):
            raise _Refused("has brackets that are empty, or that begin with `]`; write `\\]`")
        if self._text.startswith("[:", self._at):
            raise _Refused("has a class such as `[:alpha:]`, which is not supported")
        classes = _WIDE if negated else _NARROW
        parts: list[str] = []
        while not self._skip("]"):
            first = self._member(classes)
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(classes)
                if first in classes.values() or last in classes.values():
                    raise _Refused("has a range that begins or ends with a class")
                parts.append(self._range(first, last, negated))
            elif negated or not (self._of_schema and _is_unwritable(first)):
                parts.append(first)
        parts = [part for part in parts if part]
        if not parts:
            raise _Refused(_CANNOT_WRITE)
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _range(self, first: str, last: str, negated: bool) -> str:
        """Return a range of a class. In a schema, it neither begins nor ends with characters that an answer cannot
        contain: of all of them, the library makes escapes of other characters."""
        if negated or not self._of_schema or not (_is_unwritable(first) or _is_unwritable(last)):
            return f"{first}-{last}"
        low, high = _code(first), _code(last)
        if low > high:
            raise _Refused("has a range whose end comes before its beginning")
        while low <= high and not is_writable(chr(low)):
            low += 1
        while low <= high and not is_writable(chr(high)):
            high -= 1
        return f"{_literal(chr(low))}-{_literal(chr(high))}" if low <= high else ""

    def _member(self, classes: dict[str, str]) -> str:
        character = self._take()
        if character != "\\":
            return _literal(character)
        escaped = self._take()
        if escaped in classes:
            return classes[escaped]
        if escaped in "pP":
            return "\\" + escaped + self._property()
        if escaped == "b":
            return r"\x08"
        return self._character_escape(escaped)


def _is_unwritable(part: str) -> bool:
    """Whether a part of an expression is a character that texts of an answer cannot contain."""
    return len(part) == 4 and part.startswith(r"\x") and not is_writable(chr(int(part[2:], 16)))


def _code(part: str) -> int:
    if part.startswith(("\\p", "\\P")):
        raise _Refused("has a range that begins or ends with a class")
    return int(part[2:], 16) if len(part) == 4 else ord(part)


def _literal(character: str) -> str:
    """Return a character as itself, inside and outside brackets."""
    if character.isascii() and not character.isalnum() and character not in " _\"'!,:;<>=@%`/":
        return f"\\x{ord(character):02x}"
    return character
