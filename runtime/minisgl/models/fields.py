"""Typed access to the fields of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl.errors import ModelError

_LARGEST: Final = 2**31 - 1


class Fields:
    """Fields of a config.json: a missing or mistyped one is a ModelError `invalid_config` that names it. A field that
    is null counts as missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, name: str, default: int | None = None, most: int = _LARGEST, *, may_be_zero: bool = False) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if may_be_zero else 1):
            kind = "0 or a positive integer" if may_be_zero else "a positive integer"
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not {kind}")
        if value > most:
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}; at most {most} are supported")
        return value

    def amount(self, name: str, default: int = 0) -> int:
        """A number of things that may be 0 or, which is the same, null."""
        return self.count(name, default) if self.raw(name, default) else 0

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not true or false")
        return value

    def only(self, name: str, *supported: object) -> None:
        """Check that a field that changes what a model computes has one of these values, if the file has it."""
        value = self._config.get(name)
        if value is not None and value not in supported:
            raise ModelError(
                "unsupported_architecture",
                f"config.json: {name} is {value!r:.80}, which is not supported for this architecture; supported is "
                + " or ".join(map(repr, supported)),
            )

    @property
    def all(self) -> Mapping[str, Any]:
        """The whole object."""
        return self._config

    def raw(self, name: str, default: Any = None) -> Any:
        """Value of any type: null where the file says so, `default` where it says nothing."""
        return self._config.get(name, default)

    def number_or_null(self, name: str, default: float) -> float | None:
        """A number, or None where the file says null."""
        return None if self.raw(name, default) is None else self.number(name, default)

    def numbers(self, name: str, count: int, default: Sequence[int]) -> list[int]:
        """List of one integer for each of `count` layers."""
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, int) for v in value):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not a list of {count} integers")
        return list(value)

    def factors(self, name: str) -> tuple[float, ...]:
        """List of positive numbers."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and v > 0 for v in value
        ):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not a list of positive numbers")
        return tuple(map(float, value))

    def layers(self, name: str) -> list[int]:
        value = self._get(name, ())
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) for v in value):
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not a list of layer numbers")
        return list(value)

    def _get(self, name: str, default: object) -> Any:
        value = self._config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError("invalid_config", f"config.json has no {name}")
        return value
