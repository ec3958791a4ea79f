"""What a gateway adds: streamed events that it passes on per second of its CPU time, and the time of a short request:
`python benchmarks/gateway.py`.

Frontend and client are stubs in processes of their own. The frontend writes one event at a time, and each arrives at
the gateway alone. Short requests are sent at a constant rate, once through the gateway and once to the frontend itself.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, cast

import uvloop

from minisgl.bench.report import report
from minisgl.flags.arguments import Parser, add_json_argument, integer, number
from minisgl.gateway.config import GatewayOptions
from minisgl.gateway.process import GatewayServer

_TARGET: Final = 25_000
_TARGET_MS: Final = 1.0
_EVENT: Final = (
    b'data: {"id":"chatcmpl-5d41402abc4b2a76b9719d911017c592","object":"chat.completion.chunk","created":1764500000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST: Final = b"0\r\n\r\n"
_MODELS: Final = b'{"data":[{"id":"m"}]}'
_SHORT: Final = b'{"id":"x","object":"text_completion","choices":[{"text":"ok"}]}'
_BODY: Final = b'{"model":"m","prompt":"' + b"word " * 400 + b'","max_tokens":1}'
_START_SECONDS: Final = 60


class _Stub(asyncio.Protocol):
    """A frontend: streams `events` events with a pause between two, or answers at once."""

    def __init__(self, events: int, pause: float) -> None:
        self._events = events
        self._pause = pause
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (request := self._next()) is not None:
            if request.startswith(b"GET /v1/models"):
                self._answer(_MODELS)
            elif b"/v1/chat/completions" in request[:40]:
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                asyncio.get_running_loop().create_task(self._stream())
            else:
                self._answer(_SHORT)

    def _next(self) -> bytes | None:
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return None
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return None
        self._received = rest[length:]
        return head

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    async def _stream(self) -> None:
        for _ in range(self._events):
            self._transport.write(_CHUNK)
            await asyncio.sleep(self._pause)
        self._transport.write(_LAST)


def _run_stub(events: int, pause: float, parent: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Stub(events, pause), "127.0.0.1", 0)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def _run_gateway(backend: int, parent: Connection) -> None:
    server = GatewayServer(GatewayOptions(port=0, control_port=0, backends=(f"http://127.0.0.1:{backend}",)))
    server.run(parent.send)


def start(target: Callable[..., None], *args: object) -> tuple[multiprocessing.Process, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    assert ours.poll(_START_SECONDS), "the process has started"
    return process, int(ours.recv())


def _cpu_seconds(pid: int | None) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def until_ready(port: int) -> None:
    """Wait until the gateway has listed the models."""
    async with asyncio.timeout(_START_SECONDS):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            is_ready = (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            if is_ready:
                return
            await asyncio.sleep(0.1)


async def _read_stream(port: int) -> int:
    """Return the number of events of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("/v1/chat/completions", b'{"model":"m","messages":[],"stream":true}'))
    events = 0
    received = b""
    while not received.endswith(_LAST):
        part = await reader.read(1 << 16)
        assert part, "the stream is complete"
        events += part.count(b"data: ")
        received = (received + part)[-len(_LAST) :]
    writer.close()
    return events


async def _streams(port: int, streams: int) -> int:
    return sum(await asyncio.gather(*(_read_stream(port) for _ in range(streams))))


async def _short_requests(port: int, rate: float, seconds: float) -> list[float]:
    """Return the times of requests that are sent at a constant rate, over connections that are kept."""
    loop, times = asyncio.get_running_loop(), list[float]()
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one() -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        begin = time.perf_counter()
        writer.write(request("/v1/completions", _BODY))
        await reader.readuntil(_SHORT)
        times.append(time.perf_counter() - begin)
        idle.append((reader, writer))

    begin = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(begin + number / rate - loop.time(), 0))
            tasks.create_task(one())
    for _, writer in idle:
        writer.close()
    return times[len(times) // 10 :]


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--streams", type=integer(1), default=100, help="streams at a time (default: 100)")
    parser.add_argument("--events", type=integer(1), default=500, help="events of each (default: 500)")
    parser.add_argument("--pause-ms", type=number(0, with_low=True), default=5.0, help="between two (default: 5)")
    parser.add_argument("--rate", type=number(1), default=500.0, help="short requests per second (default: 500)")
    parser.add_argument("--seconds", type=number(1), default=10.0, help="time of short requests (default: 10)")
    add_json_argument(parser)
    args = parser.parse_args()
    stub, stub_port = start(_run_stub, args.events, args.pause_ms / 1000)
    gateway, port = start(_run_gateway, stub_port)
    uvloop.run(until_ready(port))
    uvloop.run(_streams(port, 2))
    begin = _cpu_seconds(gateway.pid)
    events = uvloop.run(_streams(port, args.streams))
    assert events == args.streams * args.events
    per_second = events / (_cpu_seconds(gateway.pid) - begin)
    direct = uvloop.run(_short_requests(stub_port, args.rate, args.seconds))
    begin = _cpu_seconds(gateway.pid)
    through = uvloop.run(_short_requests(port, args.rate, args.seconds))
    per_request = (_cpu_seconds(gateway.pid) - begin) / (args.rate * args.seconds)
    added = [
        1000 * (statistics.quantiles(through, n=100)[p - 1] - statistics.quantiles(direct, n=100)[p - 1])
        for p in (50, 99)
    ]
    report(
        "gateway",
        {
            "events_per_cpu_second": per_second,
            "short_request_cpu_ms": per_request * 1000,
            "short_request_added_p50_ms": added[0],
            "short_request_added_p99_ms": added[1],
            "short_request_direct_p50_ms": statistics.median(direct) * 1000,
        },
        {"events_per_cpu_second": _TARGET, "short_request_added_p50_ms": _TARGET_MS},
        args.json,
    )
    gateway.terminate()
    stub.terminate()


if __name__ == "__main__":
    main()
