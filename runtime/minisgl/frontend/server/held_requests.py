"""Valid requests that wait because no engine is routable. Their bodies are kept as they came.

They leave in the order of their arrival, a few at a time, as far as the limits on waiting requests have room. Until all
have left, new requests wait behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.server.admission import Admission

_LEAVING: Final = 32
"""Most requests that have left but are not submitted yet: their bodies are parsed and their constraints are checked."""
_BYTES_PER_TOKEN: Final = 4
_MAX_WAITS: Final = 16
"""Most polls that wait for an arrival: one operator has one, and its successor another."""


class Held:
    """One request, from its arrival here until it is submitted or ends in an error."""

    def __init__(self, size: int, tenant: str) -> None:
        self.size = size
        """Bytes of the body."""
        self.tenant = tenant
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the request may be submitted; or the error that it ends in."""

    @property
    def tokens(self) -> int:
        """Estimate of its prompt's tokens."""
        return self.size // _BYTES_PER_TOKEN

    async def wait(self) -> None:
        """Wait until the request may be submitted. Raises the error that it ends in."""
        await asyncio.shield(self.left)

    def fail(self, error: ApiError | ClientDisconnected) -> None:
        if not self.left.done():
            self.left.set_exception(error)
            # Nobody may be waiting for it any more.
            self.left.exception()


class HeldRequests:
    """All methods belong to the event loop."""

    def __init__(self, admission: Admission, max_bytes: int) -> None:
        """`max_bytes`: limit of all bodies together."""
        self._admission = admission
        self._max_bytes = max_bytes
        self._queue: deque[Held] = deque()
        self._leaving: set[Held] = set()
        self._bytes = 0
        self._is_open = False
        """An engine is routable."""
        self._arrivals: set[asyncio.Future[None]] = set()
        """Done at the next arrival."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @property
    def bytes(self) -> int:
        """Size of the bodies that are kept."""
        return self._bytes

    def hold(self, size: int, tenant: str) -> Held:
        """Let a tenant's request with a body of `size` bytes wait. The caller must `release` it. Raises ApiError when
        there is no room."""
        self._admission.hold(self._bytes + size <= self._max_bytes or not self._bytes, tenant)
        held = Held(size, tenant)
        self._queue.append(held)
        self._bytes += size
        self.notify()
        return held

    def set_open(self, is_open: bool) -> None:
        """Take the news whether an engine is routable. Said again, it lets requests leave that had no room before."""
        self._is_open = is_open
        self._let_go()

    def _let_go(self) -> None:
        while (
            self._is_open
            and self._queue
            and len(self._leaving) < _LEAVING
            and self._admission.has_room(self._queue[0].tokens)
        ):
            held = self._queue.popleft()
            self._leaving.add(held)
            self._admission.correct_tokens(held.tokens, held.tenant)
            if not held.left.done():
                held.left.set_result(None)

    def release(self, held: Held) -> None:
        """The request is admitted, or has ended. A second call does nothing."""
        if held in self._leaving:
            self._leaving.remove(held)
            self._admission.leave_queue(held.tokens, held.tenant)
        elif held in self._queue:
            self._queue.remove(held)
            self._admission.leave_queue(0, held.tenant)
        else:
            return
        self._bytes -= held.size
        self._let_go()

    def fail_all(self, error: ApiError) -> None:
        for held in self._queue:
            held.fail(error)

    def notify(self) -> None:
        """End the waits of `wait_for_arrival`."""
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None)

    async def wait_for_arrival(self, seconds: float) -> None:
        """Return at the next arrival, and at the latest after `seconds`; at once if many wait already."""
        if len(self._arrivals) >= _MAX_WAITS:
            return
        arrival = asyncio.get_running_loop().create_future()
        self._arrivals.add(arrival)
        try:
            await asyncio.wait({arrival}, timeout=seconds)
        finally:
            self._arrivals.discard(arrival)
