"""Headers and pings of a stream whose answer has not begun, because no engine has queued its request yet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from starlette.types import Send

from minisgl.frontend.generation.response_format import KEEPALIVE

_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would collect the events otherwise.
    "x-accel-buffering": "no",
}


class _Body(msgspec.Struct):
    """The one field of a body that decides whether its answer is a stream."""

    stream: bool | None = None


_decoder: Final = msgspec.json.Decoder(_Body)


class StreamOpening:
    """Of the response to one request. Until `is_open` an error may have an HTTP status of its own."""

    def __init__(self, send: Send, body: bytes, header_at: float, ping_seconds: float) -> None:
        """`body`: of the request. While it waits, the headers of a stream are sent at `header_at`, on the clock of the
        event loop, and a ping every `ping_seconds` after that."""
        self.is_open = False
        self._send = send
        self._body = body
        self._next_at = header_at
        self._ping_seconds = ping_seconds

    async def open(self, headers: dict[str, str]) -> None:
        """Send the headers, with further `headers`, unless they are sent."""
        if not self.is_open:
            self.is_open = True
            raw = [(name.encode(), value.encode()) for name, value in (_HEADERS | headers).items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def until(self, wait: Callable[[], Awaitable[None]], deadline: float) -> None:
        """Wait for what `wait` waits for; it may be called again and again. Raises TimeoutError at the deadline."""
        while True:
            try:
                async with asyncio.timeout_at(min(self._next_at, deadline)):
                    return await wait()
            except TimeoutError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await self._keep_open()

    async def _keep_open(self) -> None:
        if not self.is_open and not _wants_stream(self._body):
            # A whole answer has its status in its headers, so they come last.
            self._next_at = math.inf
            return
        await self.open({})
        await self._send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})
        self._next_at = asyncio.get_running_loop().time() + self._ping_seconds


def _wants_stream(body: bytes) -> bool:
    try:
        return _decoder.decode(body).stream is True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
