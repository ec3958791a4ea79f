"""A gateway in the loop of a test, and a client of it that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from minisgl.gateway.config import GatewayLimits, GatewayOptions
from minisgl.gateway.process import GatewayServer
from support.gateway.stub_frontend import StubFrontend

WAIT_SECONDS = 20.0


class Answer(msgspec.Struct):
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Code of an error."""
        error = self.json["error"]
        return str(error["code"] if isinstance(error, dict) else self.json["code"])


class RunningGateway:
    """`port` and `control_port` of a gateway that serves."""

    def __init__(self, server: GatewayServer) -> None:
        self.server = server

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def raw(self, request: bytes) -> bytes:
        """Return all that the gateway sends until it closes the connection."""
        reader, writer = await self.connect()
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        finally:
            writer.close()

    async def request(self, method: str, path: str, body: Any = None, headers: str = "") -> Answer:
        return await self._request(self.server.port, method, path, body, headers)

    async def post(self, path: str, body: Any, headers: str = "") -> Answer:
        return await self.request("POST", path, body, headers)

    async def get(self, path: str, headers: str = "") -> Answer:
        return await self.request("GET", path, None, headers)

    async def control(self, path: str) -> Any:
        return (await self._request(self.server.control_port, "GET", path, None, "")).json

    async def is_ready(self) -> bool:
        return bool((await self.control("/ready"))["ready"])

    async def metrics(self) -> str:
        """Return the page of metrics."""
        return (await self._request(self.server.control_port, "GET", "/metrics", None, "")).body.decode()

    async def demand(self, name: str) -> Any:
        """Return what the gateway reports of a model to the operator; None: nothing."""
        return (await self.control("/gateway/status"))["models"].get(name)

    @staticmethod
    async def _request(port: int, method: str, path: str, body: Any, headers: str) -> Answer:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        host = "" if "host:" in headers else "host: localhost\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{host}{headers}content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        try:
            return parsed(await asyncio.wait_for(reader.read(), WAIT_SECONDS))
        finally:
            writer.close()


def parsed(raw: bytes) -> Answer:
    """Return the response in these bytes. A chunked body must be complete."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Answer(int(first.split()[1]), headers, body)


def _joined(chunks: bytes) -> bytes:
    body = b""
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert chunks == b"\r\n", "the body is complete"
            return body
        body += chunks[:length]
        chunks = chunks[length + 2 :]


@contextlib.asynccontextmanager
async def gateway_of(
    *stubs: StubFrontend, limits: GatewayLimits | None = None, **options: Any
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in front of these frontends."""
    server = GatewayServer(
        GatewayOptions(
            port=0,
            control_port=0,
            backends=tuple(stub.url for stub in stubs),
            limits=limits or GatewayLimits(),
            **{"drain_timeout": 0.1, **options},
        )
    )
    async with running(server) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def running(server: GatewayServer) -> AsyncIterator[RunningGateway]:
    """Run a gateway until its first list of models is complete, and stop it in the end."""
    started = asyncio.Event()
    task = asyncio.create_task(server.serve(lambda port: started.set()))
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    gateway = RunningGateway(server)
    try:
        await until(gateway.is_ready)
        yield gateway
    finally:
        server.stop()
        await asyncio.wait_for(task, WAIT_SECONDS)


async def until(holds: Callable[[], Any]) -> None:
    """Wait until a condition holds, which may be a coroutine."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)
