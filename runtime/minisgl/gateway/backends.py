"""Models of servers that are given by URL, as on one machine: each is asked for its models all the time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from minisgl.errors import CodedError
from minisgl.gateway.directory import Directory
from minisgl.gateway.models import Address, Key, Model
from minisgl.gateway.upstream import Client, UpstreamError

logger = logging.getLogger(__name__)

_SECONDS: Final = 1.0
"""Between two questions to a server."""
_ANSWER_SECONDS: Final = 5.0


class BackendError(CodedError):
    """A URL of a server cannot be used."""


class Listed(msgspec.Struct, frozen=True):
    """A model as a server lists it."""

    id: str
    created: int = 0
    max_model_len: int | None = None
    task: str | None = None
    capabilities: Any = None


class _Listing(msgspec.Struct):
    data: list[Listed]


_decoder: Final = msgspec.json.Decoder(_Listing)


def parse_backend(url: str) -> Address:
    """Return the address of a URL. Raises BackendError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.username:
        message = f"--backend {url} is not the URL of a server; write http://HOST:PORT"
        raise BackendError("invalid_backend", message)
    return Address(host, port)


def models_of(listings: Mapping[Address, Sequence[Listed]], unreachable: Mapping[Address, str]) -> list[Model]:
    """Return the models of all servers. Those whose first model has the same name serve one model. `listings`: what
    each server listed last, never empty; `unreachable`: servers that do not answer now, and why. Pure."""
    groups: dict[str, list[Address]] = {}
    for address, listed in listings.items():
        groups.setdefault(listed[0].id, []).append(address)
    models = []
    for name, addresses in groups.items():
        reachable = [address for address in addresses if address not in unreachable]
        first = listings[(reachable or addresses)[0]][0]
        names = dict.fromkeys(listed.id for address in reachable or addresses for listed in listings[address])
        models.append(
            Model(
                key=Key("", name),
                names=tuple(names),
                state="ready" if reachable else "starting",
                reason="" if reachable else f"no answer: {unreachable[addresses[0]]}",
                addresses=tuple(reachable or addresses),
                created=first.created,
                max_model_len=first.max_model_len,
                task=first.task,
                capabilities=first.capabilities,
            )
        )
    return models


class Backends:
    """Source of the models of given servers."""

    def __init__(self, client: Client, addresses: Sequence[Address], directory: Directory) -> None:
        self._client = client
        self._addresses = addresses
        self._directory = directory
        self._listings: dict[Address, Sequence[Listed]] = {}
        self._unreachable: dict[Address, str] = {}
        self._asked: set[Address] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses:
                tasks.create_task(self._follow(address))

    async def _follow(self, address: Address) -> None:
        while True:
            problem = await self._ask(address)
            if problem and problem != self._unreachable.get(address):
                logger.warning("the server at %s:%d does not list its models: %s", *address, problem)
            if problem:
                self._unreachable[address] = problem
            elif self._unreachable.pop(address, None) is not None:
                logger.info("the server at %s:%d lists its models again", *address)
            self._asked.add(address)
            self._directory.replace(models_of(self._listings, self._unreachable), lambda key: True)
            if len(self._asked) == len(self._addresses):
                self._directory.problem = ""
            await asyncio.sleep(_SECONDS)

    async def _ask(self, address: Address) -> str:
        """Read the models of a server. Returns what is wrong; empty: nothing."""
        try:
            status, body = await self._client.get(address, "/v1/models", {}, _ANSWER_SECONDS)
        except UpstreamError as error:
            return str(error)
        if status != 200:
            return f"status {status} for GET /v1/models"
        try:
            listed = _decoder.decode(body).data
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"GET /v1/models is no list of models: {error}"
        if not listed:
            return "it has no model"
        self._listings[address] = listed
        return ""
