"""The messages of one stream, as they come from the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from minisgl.frontend.errors import ClientDisconnected

T = TypeVar("T")


class Incoming:
    """All methods belong to the stream's task, which must `close` it."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """`read` returns the next message; None: the proxy has ended the stream."""
        self._read = read
        self._arrival: asyncio.Task[Any] | None = None
        """The next message, for which somebody has waited in vain: gRPC allows one read at a time, to its end."""

    async def next(self) -> Any:
        """Return the next message; None: there is none."""
        if self._arrival is None:
            return await self._read()
        message = await self._arrival
        self._arrival = None
        return message

    async def unless_ended(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for something else, as long as the proxy does not end the stream. Raises ClientDisconnected."""
        if self._arrival is None:
            self._arrival = asyncio.create_task(self._read())
        arrival = self._arrival
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait({task, arrival}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and arrival.result() is None:
                raise ClientDisconnected
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def close(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival.add_done_callback(_forget)


def _forget(arrival: asyncio.Task[Any]) -> None:
    """Take the exception of a task that nobody waits for."""
    if not arrival.cancelled():
        arrival.exception()
