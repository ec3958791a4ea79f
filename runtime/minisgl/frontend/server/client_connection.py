"""The client's connection, for what a response needs and ASGI has no message for.

A part of a streamed response that is sent as an ASGI message wakes the task of its request, which is resumed through a
dozen frames of framework and middleware and sends through as many again: 16 of the 33 µs of CPU time that the frontend
took for a token. All that this adds to a part is the framing of a chunk, so `write` gives it to the connection from
where it arrives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from minisgl.frontend.errors import ApiError

T = TypeVar("T")

_KEY: Final = "minisgl.client"
"""Name of the ASGI extension."""


class ClientConnection:
    """The connection of one response. `wait_flushed` waits until the client has read all that was written, or left."""

    def __init__(self, cycle: RequestResponseCycle, wait_flushed: Callable[[], Awaitable[None]]) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.wait_flushed = wait_flushed
        self.body_error: ApiError | None = None
        """Why the rest of the request's body cannot be read."""

    @property
    def peer(self) -> str:
        """IP address at the other end of the connection, whatever headers say; empty: unknown."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    def write(self, render: Callable[[T], bytes], output: T) -> bool:
        """Write what `render` makes of the output, a part of the body that is not the last; nothing that was given to
        `send` may be in progress. False: nothing was rendered and written, because the client reads too slowly or has
        left; `send` handles both."""
        # A client that left before the headers were sent leaves a response without an encoding.
        if self._flow.write_paused or self._transport.is_closing() or not self._cycle.chunked_encoding:
            return False
        # An empty chunk would end the body.
        if part := render(output):
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def abort(self) -> None:
        """Close the connection immediately and discard what waits to be sent."""
        self._transport.abort()


def extension(connection: ClientConnection) -> dict[str, dict[object, object]]:
    """Return the ASGI extensions of a scope with this connection."""
    return {_KEY: {"connection": connection}}


def client_connection(scope: Scope) -> ClientConnection:
    """Return the connection of a scope that `Connection` made."""
    connection: ClientConnection = scope["extensions"][_KEY]["connection"]
    return connection


def body_error(scope: Scope) -> ApiError | None:
    """Return why the rest of the request's body cannot be read; None: it can. Servers other than `Connection` make
    scopes without the extension, and end a broken body themselves."""
    extensions = scope.get("extensions") or {}
    connection: ClientConnection | None = extensions[_KEY]["connection"] if _KEY in extensions else None
    return None if connection is None else connection.body_error
