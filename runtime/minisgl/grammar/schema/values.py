"""Values in schemas: constants and numbers that can be written exactly."""

from __future__ import annotations

import sys
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

from minisgl.grammar.schema.refusals import (
    EXACT_INTEGER,
    MAX_DEPTH,
    MAX_DIVISOR,
    MAX_LENGTH,
    Path,
    too_complex,
    unsupported,
)

_DIGITS: Final = 15
"""Decimal digits that every double keeps."""
ESCAPES: Final = 'nrbtf\\"'
"""Letters behind a backslash in a JSON text."""
_WRITABLE: Final = frozenset("\b\t\n\f\r")
"""Control characters with a short escape. Others could only be written as `\\uXXXX`, which stays forbidden: a key that
is written in two ways would be two keys to the grammar."""


def check_text(text: str, path: Path) -> None:
    """Refuse a text that an answer cannot contain. Raises GrammarError."""
    if not all(map(is_writable, text)):
        raise unsupported(path, "control characters other than \\b, \\t, \\n, \\f and \\r are not supported")


def is_writable(character: str) -> bool:
    """Return whether a text of an answer can contain a character."""
    return (character >= " " and character != "\x7f") or character in _WRITABLE


def check_constant(value: Any, path: Path) -> None:
    """Refuse a value of `const` or `enum` that an answer cannot contain. Raises GrammarError."""
    if len(path) > 4 * MAX_DEPTH:
        raise too_complex(path, "the value is nested too deeply")
    match value:
        case str():
            check_text(value, path)
        case bool() | None:
            return
        case int() | float():
            if not _is_finite(value) or (isinstance(value, int) and abs(value) > EXACT_INTEGER):
                raise unsupported(path, "integers beyond 2**53 cannot be written exactly; use a string")
        case list():
            for i, item in enumerate(value):
                check_constant(item, (*path, i))
        case dict():
            for key, item in value.items():
                check_text(key, (*path, key))
                check_constant(item, (*path, key))


def length(value: Any, path: Path) -> int:
    """Return the value of `maxLength` and its like. Raises GrammarError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise unsupported(path, "expected an integer of at least 0")
    return min(value, MAX_LENGTH)


def number(value: Any, path: Path) -> int | float:
    """Return the value of `minimum` and its like. Raises GrammarError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise unsupported(path, "expected a number")
    return value


def check_divisor(value: int | float, path: Path) -> None:
    """Refuse a value of `multipleOf` that takes too long to enforce. Raises GrammarError."""
    if value <= 0:
        raise unsupported(path, "expected a number above 0")
    digits = "".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))
    if int(digits) > MAX_DIVISOR:
        raise too_complex(path, f"a divisor of more digits than those of {MAX_DIVISOR} is not supported")


def at_least(bound: int | float) -> int | float:
    """Return the bound, or the least number above it that is exact as a double."""
    return bound if abs(bound) <= EXACT_INTEGER else _rounded(bound, ROUND_CEILING)


def at_most(bound: int | float) -> int | float:
    """Return the bound, or the greatest number below it that is exact as a double."""
    return bound if abs(bound) <= EXACT_INTEGER else _rounded(bound, ROUND_FLOOR)


def inside(bound: int | float, upwards: bool) -> int | float:
    """Return a number just above, or just below, an integral bound. The library mistakes an exclusive bound that is an
    integer for an inclusive one where the other bound is less than 1 away."""
    step = Decimal(1).scaleb(-6)
    return float(Decimal(bound) + (step if upwards else -step))


def _is_finite(value: int | float) -> bool:
    """Whether the number is finite as a double; integers of JSON have no limit."""
    return abs(value) <= sys.float_info.max


def _rounded(bound: int | float, rounding: str) -> int | float:
    rounded = Context(prec=_DIGITS, rounding=rounding).create_decimal(Decimal(bound))
    return int(rounded) if isinstance(bound, int) else float(rounded)
