"""Requests that wait for a row, by priority and then by arrival."""

from __future__ import annotations

import heapq

from minisgl.scheduler.request import Request


class WaitingQueue:
    """Heap with an index by id. Removed entries are skipped when they reach the top, and dropped when they are the
    majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._by_id: dict[bytes, Request] = {}
        self.tokens = 0
        """Tokens of all requests, prompts and those that they had generated before a preemption."""

    def __len__(self) -> int:
        return len(self._by_id)

    def push(self, request: Request) -> None:
        """Add a request that is not queued."""
        assert request.id not in self._by_id
        self._by_id[request.id] = request
        self.tokens += len(request.tokens)
        heapq.heappush(self._heap, (request.priority_key, request))
        if len(self._heap) > 2 * len(self._by_id) + 64:
            self._heap = [entry for entry in self._heap if self._by_id.get(entry[1].id) is entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        """The next request; None when the queue is empty."""
        while self._heap:
            request = self._heap[0][1]
            if self._by_id.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Remove and return the next request; the queue is not empty."""
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self.remove(request.id)
        return request

    def remove(self, request_id: bytes) -> Request | None:
        """Remove and return a request; None when it is not queued."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            self.tokens -= len(request.tokens)
        return request
