"""Requests that wait for a row: by priority, then by the shares of their tenants, then by arrival."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from minisgl.scheduler.request import Request
from minisgl.scheduler.shares import Shares


class _Tenant:
    """Requests of one tenant: a heap with an index by id. Removed entries are skipped when they reach the top, and
    dropped when they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self.by_id: dict[bytes, Request] = {}

    def push(self, request: Request) -> None:
        self.by_id[request.id] = request
        heapq.heappush(self._heap, (request.priority_key, request))
        if len(self._heap) > 2 * len(self.by_id) + 64:
            self._heap = [entry for entry in self._heap if self.by_id.get(entry[1].id) is entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> Request:
        """The next request; there is one."""
        while self.by_id.get((request := self._heap[0][1]).id) is not request:
            heapq.heappop(self._heap)
        return request


class WaitingQueue:
    """A queue for each tenant."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._tenants: dict[bytes, _Tenant] = {}
        self._order: list[tuple[tuple[int, bool, int, int, int], bytes]] = []
        """Heap of tenants by `Shares.key` of their first requests. A key that has grown since is renewed when it is at
        the top; that of a new first request gets another entry."""
        self._tenant_of: dict[bytes, bytes] = {}
        """Tenant by id of request."""
        self.tokens = 0
        """Tokens of all requests, prompts and those that they had generated before a preemption."""

    def __len__(self) -> int:
        return len(self._tenant_of)

    @property
    def tenants(self) -> Collection[bytes]:
        """Tenants that have requests here."""
        return self._tenants.keys()

    def num_of(self, tenant: bytes) -> int:
        """Number of requests of a tenant."""
        return len(self._tenants[tenant].by_id) if tenant in self._tenants else 0

    def push(self, request: Request) -> None:
        """Add a request that is not queued."""
        assert request.id not in self._tenant_of
        self._tenant_of[request.id] = request.tenant
        if (queue := self._tenants.get(request.tenant)) is None:
            queue = self._tenants[request.tenant] = _Tenant()
        queue.push(request)
        self.tokens += len(request.tokens)
        if queue.first() is request:
            heapq.heappush(self._order, (self._shares.key(request), request.tenant))
            if len(self._order) > 2 * len(self._tenants) + 64:
                self._order = [(self._shares.key(queue.first()), tenant) for tenant, queue in self._tenants.items()]
                heapq.heapify(self._order)

    def peek(self) -> Request | None:
        """The next request; None when the queue is empty."""
        while self._order:
            key, tenant = self._order[0]
            if (queue := self._tenants.get(tenant)) is None:
                heapq.heappop(self._order)
                continue
            first = queue.first()
            if (now := self._shares.key(first)) <= key:
                return first
            heapq.heapreplace(self._order, (now, tenant))
        return None

    def pop(self) -> Request:
        """Remove and return the next request; the queue is not empty."""
        request = self.peek()
        assert request is not None
        self.remove(request.id)
        return request

    def remove(self, request_id: bytes) -> Request | None:
        """Remove and return a request; None when it is not queued."""
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:
            return None
        queue = self._tenants[tenant]
        request = queue.by_id.pop(request_id)
        if not queue.by_id:
            del self._tenants[tenant]
        self.tokens -= len(request.tokens)
        return request
