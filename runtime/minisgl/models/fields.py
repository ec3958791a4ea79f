"""Typed access to the fields of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from minisgl.models.errors import ModelError

_LARGEST: Final = 2**31 - 1


class Fields:
    """Fields of a config.json: a missing or mistyped one is a ModelError `invalid_config` that names it. A field that
    is null counts as missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, name: str, default: int | None = None, most: int = _LARGEST) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}, not a positive integer")
        if value > most:
            raise ModelError("invalid_config", f"config.json: {name} is {value!r:.80}; at most {most} are supported")
        return value

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
