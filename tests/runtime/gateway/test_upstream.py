"""Connections of a gateway to servers."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest
import uvloop

from minisgl.gateway.models import Address
from minisgl.gateway.upstream import Client, UpstreamError

UNKNOWN = Address("no-such-server.invalid", 80)


def test_nothing_is_logged_of_a_lookup_whose_client_has_left() -> None:
    async def leave() -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        client = Client(20)
        connecting = asyncio.create_task(client.connect(UNKNOWN))
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        # The lookup of before has failed too by now.
        with pytest.raises(UpstreamError, match=r"not known|failure in name resolution"):
            await client.connect(UNKNOWN)
        del connecting
        gc.collect()
        await asyncio.sleep(0)
        return logged

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(leave()) == []


async def test_the_next_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.2", 0)
    port = server.sockets[0].getsockname()[1]

    async def addresses(*_: object, **__: object) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (host, port)) for host in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    client = Client(20)
    await client.connect(Address("two-addresses.example", port))
    client.close()
    server.close()
