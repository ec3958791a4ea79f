"""List and watch of objects of one kind at the API server."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Final, Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from minisgl.errors import describe
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.models import Metadata
from minisgl.gateway.upstream import Client, Exchange, UpstreamError

logger = logging.getLogger(__name__)

_PAGE: Final = 250
"""Objects of one page of a list."""
_LIST_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 240
"""Time after which the server ends a watch."""
_GRACE_SECONDS: Final = 30.0
_FIRST_PAUSE: Final = 0.2
_LAST_PAUSE: Final = 10.0
_MAX_EVENT_BYTES: Final = 16 << 20
_GONE: Final = 410
_REMEDIES: Final = {
    401: "the token of the service account is not accepted",
    403: "its service account may not list and watch them; upgrade the chart of the operator, which has the role",
    404: "the cluster does not know them; install the operator with its CustomResourceDefinition",
}


class _ListMetadata(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Object(msgspec.Struct):
    metadata: Metadata


class WatchError(Exception):
    """The API server refuses a list or a watch."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


T = TypeVar("T")


class Watch(Generic[T]):
    """Follows the objects of one kind, of which only the fields of a struct are kept."""

    def __init__(
        self,
        client: Client,
        access: ClusterAccess,
        path: str,
        kind: type[T],
        *,
        replace: Callable[[list[T]], None],
        put: Callable[[T], None],
        remove: Callable[[Metadata], None],
        selector: str = "",
    ) -> None:
        """`replace` takes a whole list; `put` an object that is new or has changed, `remove` the metadata of one that
        is gone. `selector`: labels that the objects have."""
        self._client = client
        self._access = access
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._replace = replace
        self._put = put
        self._remove = remove
        self._selector = {"labelSelector": selector} if selector else {}
        self._version = ""
        """Version of the last object that was seen; empty: everything must be listed."""
        self._has_begun = False
        """The last attempt has begun to watch."""

    async def run(self) -> None:
        """Run until cancelled. After an error that may pass it goes on where it was, after a growing pause."""
        pause, reported = _FIRST_PAUSE, ""
        while True:
            self._has_begun = False
            problem = ""
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except WatchError as error:
                problem = f"{error} ({_REMEDIES.get(error.status, f'status {error.status}')})"
                # Whatever is wrong with the version, a new list repairs it.
                self._version = ""
            except (UpstreamError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                problem = describe(error)
            if self._has_begun:
                pause, reported = _FIRST_PAUSE, ""
            if problem and problem != reported and not self._has_begun:
                reported = problem
                logger.warning("GET %s fails: %s; trying again", self._path, problem)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, _LAST_PAUSE)

    async def _list(self) -> None:
        found: list[T] = []
        more = ""
        while True:
            query = {**self._selector, "limit": str(_PAGE)} | ({"continue": more} if more else {})
            status, body = await self._client.get(
                self._access.address, self._url(query), self._access.headers(), _LIST_SECONDS
            )
            if status != 200:
                raise _refused(status, body)
            page = msgspec.json.decode(body, type=_List)
            found += [each for raw in page.items if (each := self._decoded(raw)) is not None]
            more = page.metadata.more
            if not more:
                break
        self._replace(found)
        self._version = page.metadata.resource_version

    async def _follow(self) -> None:
        """Take events until the server ends the watch."""
        query = self._selector | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with (
            asyncio.timeout(_WATCH_SECONDS + _GRACE_SECONDS),
            self._client.reading(self._access.address, self._url(query), self._access.headers()) as exchange,
        ):
            if exchange.status != 200:
                raise _refused(exchange.status, b"".join([piece async for piece in exchange.pieces()]))
            self._has_begun = True
            async for line in _lines(exchange):
                self._take(line)

    def _take(self, line: bytes) -> None:
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise WatchError(status.code, status.message)
        metadata = msgspec.json.decode(event.object, type=_Object).metadata
        if event.type == "DELETED":
            self._remove(metadata)
        elif event.type in ("ADDED", "MODIFIED"):
            found = self._decoded(event.object)
            if found is not None:
                self._put(found)
        self._version = metadata.resource_version

    def _decoded(self, raw: msgspec.Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except msgspec.MsgspecError as error:
            # One object that the definition of another version allowed must not hide all others.
            logger.warning("an object of %s is skipped: %s", self._path, error)
            return None

    def _url(self, query: dict[str, str]) -> str:
        return f"{self._path}?{urlencode(query)}"


async def _lines(exchange: Exchange) -> AsyncIterator[bytes]:
    kept = b""
    async for piece in exchange.pieces():
        *lines, kept = (kept + piece).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(kept) > _MAX_EVENT_BYTES:
            raise UpstreamError("an event of the watch is too long")


def _refused(status: int, body: bytes) -> WatchError:
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = ""
    return WatchError(status, message or "the API server refuses it")
