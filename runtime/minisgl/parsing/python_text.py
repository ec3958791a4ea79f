"""Python literals that a model generates, as JSON."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from minisgl.parsing.json_text import repaired
from minisgl.parsing.reader import Ended, Reader, Scan, held_suffix

_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]{1,80}\}|[0-7]{3}|[0-7]{1,2}(?=[^0-7])|[^xuUN0-7])",
    re.DOTALL,
)
_PARTIAL_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N(?:\{[^{}]{0,80})?|[0-7]{0,2})\Z"
)
_ESCAPED: Final = "abfnrtv\\'\"xuUN01234567"


class Literal(NamedTuple):
    """A literal with its value and its JSON text."""

    value: Any
    text: str


def python_literal(text: str) -> Literal | None:
    """Return the literal that the text is; None if it is none, or has no form in JSON."""
    try:
        with warnings.catch_warnings():
            # About escapes that Python does not know.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        return Literal(value, json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def json_value(text: str) -> Literal | None:
    """Return the JSON value that the text is, repaired; None if it is none."""
    text = repaired(text)
    try:
        return Literal(json.loads(text, parse_constant=_no_constant), text)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def string_value(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the text of the string literal at the position to `emit`, as it arrives. Raises Ended."""
    quote = yield from reader.peek()
    reader.at += 1
    if (yield from reader.peek()) == quote:
        reader.at += 1
        # Either an empty string, or one with three quotes.
        if (yield from reader.peek()) != quote:
            return
        reader.at += 1
        quote *= 3
    special = re.compile(rf"\\|{quote}")
    while True:
        found = special.search(reader.text, reader.at)
        begin = reader.at
        reader.at = found.start() if found else held_suffix(reader.text, begin, (quote,))
        emit(reader.text[begin : reader.at])
        if found is None:
            if reader.ended:
                raise Ended
            yield
        elif found[0] == quote:
            reader.at += len(quote)
            return
        else:
            yield from _escape(reader, emit)


def _escape(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass on the character of the escape at the position. Raises Ended."""
    while (found := _ESCAPE.match(reader.text, reader.at)) is None:
        if _PARTIAL_ESCAPE.match(reader.text, reader.at) is None:
            # Python has no such escape.
            reader.at += 1
            emit("\\")
            return
        if reader.ended:
            raise Ended
        yield
    reader.at = found.end()
    emit(_unescaped(found[0]))


def _unescaped(escape: str) -> str:
    if escape == "\\\n":
        return ""
    if escape[1] not in _ESCAPED:
        return escape
    try:
        return escape.encode().decode("unicode_escape")
    except UnicodeDecodeError:
        return escape
