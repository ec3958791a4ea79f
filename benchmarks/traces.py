"""What traces cost: processor time of a frontend, and of a gateway in front of it, with 10 % of the requests recorded
and without traces: `python benchmarks/traces.py`.

Both pairs of processes run all the time and get the same requests in turn, so that whatever else the machine does
weighs on both. A measurement takes about as long as spans wait for their export. Engine and collector are stubs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from frontend import Scenario, run_scheduler, tiny_model
from gateway import request, start, until_ready
from minisgl.bench.report import Metric, report
from minisgl.flags.arguments import Parser, add_json_argument, integer
from minisgl.frontend.config import FrontendConfig, TraceOptions
from minisgl.gateway.config import GatewayOptions

_SHARE: Final = 0.1
_TARGET_PERCENT: Final = 1.0
_CHAT: Final = {"messages": [{"role": "user", "content": "What does a trace show?"}], "ignore_eos": True}
_LOADS: Final = {"token": (32, 1, 64, 4), "request": (8, 25, 1, 8)}
"""Connections, requests of each, tokens of each, and turns of both pairs in one measurement: streams, and whole answers
of one token."""


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _run_frontend(encoded: bytes, index: int, traces: TraceOptions, parent: Connection) -> None:
    from minisgl.frontend.process import FrontendServer

    worker = msgspec.json.decode(encoded, type=Scenario).workers[index]
    addresses = (worker.frontend_address,)
    config = FrontendConfig(port=0, tokenizer_addresses=addresses, tokenizer=worker, traces=traces)
    FrontendServer(config).run(parent.send)


def _run_gateway(backend: int, traces: TraceOptions, parent: Connection) -> None:
    from minisgl.gateway.process import GatewayServer

    backends = (f"http://127.0.0.1:{backend}",)
    GatewayServer(GatewayOptions(port=0, control_port=0, backends=backends, traces=traces)).run(parent.send)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process. Its clock, which the kernel names by the id, is finer than /proc."""
    return time.clock_gettime(~pid << 3 | 2)


async def _load(port: int, connections: int, requests: int, tokens: int) -> None:
    chat = request("/v1/chat/completions", msgspec.json.encode({**_CHAT, "max_tokens": tokens, "stream": tokens > 1}))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for _ in range(requests):
            writer.write(chat)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = re.search(rb"content-length: (\d+)", head)
            await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(int(length[1])))
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition(": processor")[0])
    parser.add_argument("--pairs", type=integer(2), default=12, help="measurements of each load (default: 12)")
    add_json_argument(parser)
    args = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    recorded = TraceOptions(endpoint=f"http://127.0.0.1:{collector.server_port}", sampling=_SHARE)
    metrics: dict[str, Metric] = {}
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        model = str(tiny_model(Path(folder) / "model"))
        encoded = msgspec.json.encode(Scenario(model, folder, streams=32, step_ms=10, seconds=1, tokenizers=2))
        children = [multiprocessing.Process(target=run_scheduler, args=(encoded,), daemon=True)]
        children[0].start()
        ports: list[int] = []
        for index, traces in enumerate((TraceOptions(), recorded)):
            frontend, port = start(_run_frontend, encoded, index, traces)
            # The gateway lists its models once a second.
            uvloop.run(until_ready(port))
            gateway, port = start(_run_gateway, port, traces)
            uvloop.run(until_ready(port))
            children += frontend, gateway
            ports.append(port)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        pids = [child.pid or 0 for child in children[1:]]
        for unit, (connections, requests, tokens, turns) in _LOADS.items():
            units = turns * connections * requests * tokens
            found: list[list[float]] = []
            for number in range(args.pairs + 1):
                before = [_cpu_seconds(pid) for pid in pids]
                for turn in range(turns):
                    for port in ports if (turn + number) % 2 else ports[::-1]:
                        uvloop.run(_load(port, connections, requests, tokens))
                found.append([(_cpu_seconds(pid) - was) / units * 1e6 for pid, was in zip(pids, before, strict=True)])
            # The first one warms up.
            off_frontend, off_gateway, on_frontend, on_gateway = zip(*found[1:], strict=True)
            for name, off, on in (("frontend", off_frontend, on_frontend), ("gateway", off_gateway, on_gateway)):
                metrics[f"{name}_us_per_{unit}_off"] = statistics.median(off)
                metrics[f"{name}_us_per_{unit}_on"] = statistics.median(on)
                added = statistics.median(b / a for a, b in zip(off, on, strict=True)) - 1
                metrics[f"{name}_added_percent_per_{unit}"] = added * 100
        for child in reversed(children):
            child.kill()
            child.join()
    report("traces", metrics, {name: _TARGET_PERCENT for name in metrics if "percent" in name}, args.json)


if __name__ == "__main__":
    main()
