"""An event loop with a clock that advances only while the loop is idle: waits take no time."""

from __future__ import annotations

import asyncio
import selectors


class _Skipping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now
