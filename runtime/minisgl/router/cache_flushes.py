"""Flushes of the prefix caches of several engines, each answered with one message."""

from __future__ import annotations

from collections.abc import Callable, Collection

from minisgl.wire.messages import Flushed


class CacheFlushes:
    """`answer` receives the sum of the freed pages once every engine has answered or was lost."""

    def __init__(self, answer: Callable[[Flushed], None]) -> None:
        self._answer = answer
        self._waiting: dict[bytes, set[str]] = {}
        self._pages: dict[bytes, int] = {}

    def begin(self, flush_id: bytes, addresses: Collection[str]) -> None:
        self._waiting[flush_id] = set(addresses)
        self._pages[flush_id] = 0
        self._end_if_done(flush_id)

    def flushed(self, address: str, message: Flushed) -> None:
        if address in self._waiting.get(message.id, ()):
            self._pages[message.id] += message.pages
            self._waiting[message.id].remove(address)
            self._end_if_done(message.id)

    def lost(self, address: str) -> None:
        for flush_id, waiting in list(self._waiting.items()):
            waiting.discard(address)
            self._end_if_done(flush_id)

    def _end_if_done(self, flush_id: bytes) -> None:
        if not self._waiting[flush_id]:
            del self._waiting[flush_id]
            self._answer(Flushed(flush_id, self._pages.pop(flush_id)))
