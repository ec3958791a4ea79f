"""Deadlines of requests, the next one first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from minisgl.scheduler.request import Request


class Deadlines:
    """Deadlines of the requests in `unfinished`, by id, which belongs to the caller."""

    def __init__(self, unfinished: Mapping[bytes, Request]) -> None:
        self._unfinished = unfinished
        # Not the requests themselves, whose constraints would keep memory after the answer.
        self._entries: list[tuple[float, int, bytes]] = []

    def add(self, request: Request) -> None:
        """Add an unfinished request, if it has a deadline."""
        if request.deadline is None:
            return
        heapq.heappush(self._entries, (request.deadline, request.arrival, request.id))
        if len(self._entries) > 2 * len(self._unfinished) + 64:
            self._entries = [entry for entry in self._entries if self._awaited(*entry[1:])]
            heapq.heapify(self._entries)

    def passed(self, now: float) -> Iterator[Request]:
        """Take out the unfinished requests whose deadline has passed. The caller may end each one."""
        while self._entries and self._entries[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._entries)
            if (request := self._awaited(arrival, request_id)) is not None:
                yield request

    def _awaited(self, arrival: int, request_id: bytes) -> Request | None:
        """The request with this number, unless it has ended: then another one may have its id."""
        request = self._unfinished.get(request_id)
        return request if request is not None and request.arrival == arrival else None
