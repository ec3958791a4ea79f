"""A frontend that a test writes the responses of, byte by byte, on a port of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from support.gateway.loopback_server import LoopbackServer


class Received(msgspec.Struct):
    """One request, and the connection that it came on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: Any, headers: str = "") -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(content)}\r\n\r\n"
        )
        await self.send(head.encode() + content)

    async def begin_stream(self, headers: str = "") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers}transfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def piece(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def drop(self) -> None:
        """Close the connection, as the death of the process does."""
        self.writer.transport.abort()

    async def client_left(self) -> None:
        """Wait until the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                continue


Handler = Callable[[Received], Awaitable[None]]


async def echo(request: Received) -> None:
    """Answer with what was received."""
    await request.answer(200, {"path": request.path, "headers": request.headers, "body": request.body.decode()})


class StubFrontend(LoopbackServer):
    """Lists `names` as its models, answers probes, and gives every other request to `handler`."""

    def __init__(self, *names: str, handler: Handler = echo) -> None:
        super().__init__()
        self.names = names
        self.handler = handler
        self.received: list[Received] = []
        """Requests that `handler` got."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._answer(await _read(reader, writer))

    async def _answer(self, request: Received) -> None:
        if request.path == "/v1/models":
            await request.answer(200, {"data": [{"id": name, "created": 7} for name in self.names]})
        elif request.path == "/health":
            await request.answer(200, {"status": "ok"})
        else:
            self.received.append(request)
            await self.handler(request)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body, writer, reader)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readline() != b"\r\n":
        continue
    return body


@contextlib.asynccontextmanager
async def stub_frontend(*names: str, handler: Handler = echo) -> AsyncIterator[StubFrontend]:
    stub = StubFrontend(*names, handler=handler)
    await stub.start()
    try:
        yield stub
    finally:
        await stub.stop()
