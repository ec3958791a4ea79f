"""A stub of an OpenAI server, for tests of clients."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any


class Endpoint:
    """Fake server that streams `max_tokens` events and the usage. `broken`: streams are incomplete; `refused`: 429."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.broken = self.refused = False
        self.models: Any = {"data": [{"id": "fake"}]}
        self.metrics = b""
        self.first_event = ""
        """Data of an additional first event of each stream."""
        self.running = self.most = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result(
            60
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(re.search(r"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        content = await reader.readexactly(length)
        if head.startswith("GET /v1/models"):
            self._answer(writer, 200, self.models)
        elif head.startswith("GET /metrics"):
            self._answer(writer, 200 if self.metrics else 404, self.metrics)
        elif self.refused:
            self._answer(writer, 429, {"error": {"message": "too many", "code": "overloaded"}})
        else:
            self.running += 1
            self.most = max(self.most, self.running)
            await self._stream(writer, json.loads(content))
            self.running -= 1
        await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if self.first_event:
            self._event(writer, self.first_event)
        for _ in range(body["max_tokens"]):
            choice = {"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}
            self._event(writer, json.dumps({"choices": [choice]}))
            await asyncio.sleep(0)
        if self.broken:
            return
        prompt = len(body.get("prompt", "x"))
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        self._event(writer, json.dumps({"choices": [], "usage": usage}))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _event(writer: asyncio.StreamWriter, data: str) -> None:
        # Split in the middle, as networks do.
        for piece in (f"data: {data[:3]}", f"{data[3:]}\n\n"):
            writer.write(f"{len(piece):x}\r\n{piece}\r\n".encode())

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
