"""Writes of statuses that are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Writes:
    """Each goes on when its reconcile is cancelled: the API server may have it already, and its Events belong to it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, write: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(write)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def finish(self, seconds: float) -> None:
        """Wait for them, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A reconcile that was cancelled does not read it.
        if not task.cancelled():
            task.exception()
