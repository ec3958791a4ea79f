"""Quantities in the canonical form that the API server stores.

If the server rewrites an applied value, every later apply looks like a change (kubernetes/kubernetes #131175), so the
operator sends the canonical form. It is that of k8s.io/apimachinery's resource.Quantity: no fraction, and the largest
possible suffix of the same family (binary, decimal, exponent).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

_FORM: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:[eE]([-+]?[0-9]+)|(n|u|m|k|Ki|[MGTPE]i?))?")
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_POWER: Final = {suffix: power for power, suffix in _DECIMAL.items()}
_LARGEST_POWER: Final = 18


@lru_cache(maxsize=1024)
def canonical(quantity: str) -> str:
    """The canonical form of a valid quantity. Fractions below a billionth are rounded up."""
    _, exponent, suffix = _parts(quantity)
    value = amount(quantity)
    if suffix in _BINARY and value >= 1024:
        return _binary(value)
    digits, power = _thousands(value)
    if exponent is not None:
        return f"{digits}e{power}" if power else str(digits)
    return f"{digits}{_DECIMAL[power]}"


def amount(quantity: str) -> Fraction:
    number, exponent, suffix = _parts(quantity)
    if suffix in _BINARY:
        return Fraction(number) * Fraction(1024) ** _BINARY.index(suffix)
    return Fraction(number) * Fraction(10) ** (int(exponent) if exponent is not None else _POWER[suffix or ""])


def canonical_all(quantities: Mapping[str, str]) -> dict[str, str]:
    return {name: canonical(quantity) for name, quantity in sorted(quantities.items())}


def _parts(quantity: str) -> tuple[str, str | None, str | None]:
    """Number, decimal exponent and suffix: at most one of the latter two."""
    match = _FORM.fullmatch(quantity)
    assert match is not None, quantity
    number, exponent, suffix = match.groups()
    return number, exponent, suffix


def _binary(value: Fraction) -> str:
    digits = -(-value.numerator // value.denominator)
    step = 0
    while digits % 1024 == 0 and step < len(_BINARY) - 1:
        digits //= 1024
        step += 1
    return f"{digits}{_BINARY[step]}"


def _thousands(value: Fraction) -> tuple[int, int]:
    """(n, p) with n × 10^p = value, where p is the largest possible multiple of three."""
    digits = -(-value.numerator * 10**9 // value.denominator)
    if digits == 0:
        return 0, 0
    power = -9
    while digits % 1000 == 0 and power < _LARGEST_POWER:
        digits //= 1000
        power += 3
    return digits, power
