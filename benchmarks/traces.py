"""What traces cost: processor time of a frontend, and of a gateway in front of it, with 10 % of the requests recorded
and with none: `python benchmarks/traces.py`.

Clients say which requests are recorded, so that the same two processes do both in turn: two equal processes differ by
more than traces cost. Engine and collector are stubs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
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
from minisgl.frontend.tracing.context import TRACEPARENT, traceparent
from minisgl.gateway.config import GatewayOptions

_EVERY: Final = 10
"""One in so many requests is recorded."""
_EXPORT_SECONDS: Final = 5.5
"""Spans wait up to 5 seconds for their export, which belongs to the measurement of their requests."""
_TARGET_PERCENT: Final = 1.0
_CHAT: Final = {"messages": [{"role": "user", "content": "What does a trace show?"}], "ignore_eos": True}
_LOADS: Final = {"token": (100, 1, 64, 6), "request": (10, 50, 1, 5)}
"""Connections, requests of each, tokens of each, and turns of one measurement: streams, and whole answers of one
token."""


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _run_frontend(encoded: bytes, traces: TraceOptions, parent: Connection) -> None:
    from minisgl.frontend.process import FrontendServer

    [worker] = msgspec.json.decode(encoded, type=Scenario).workers
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


async def _load(port: int, connections: int, requests: int, tokens: int, *, recorded: bool) -> None:
    body = msgspec.json.encode({**_CHAT, "max_tokens": tokens, "stream": tokens > 1})

    async def connection(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for each in range(requests):
            is_recorded = recorded and (number * requests + each) % _EVERY == 0
            parent = traceparent(1 + random.getrandbits(120), 1 + random.getrandbits(60), sampled=is_recorded)
            writer.write(request("/v1/chat/completions", body, f"{TRACEPARENT}: {parent}\r\n"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = re.search(rb"content-length: (\d+)", head)
            await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(int(length[1])))
        writer.close()

    await asyncio.gather(*map(connection, range(connections)))


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition(": processor")[0])
    parser.add_argument("--pairs", type=integer(2), default=6, help="measurements of each load (default: 6)")
    add_json_argument(parser)
    args = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    traces = TraceOptions(endpoint=f"http://127.0.0.1:{collector.server_port}", sampling=0.0)
    metrics: dict[str, Metric] = {}
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        model = str(tiny_model(Path(folder) / "model"))
        encoded = msgspec.json.encode(Scenario(model, folder, streams=32, step_ms=10, seconds=1, tokenizers=1))
        engine = multiprocessing.Process(target=run_scheduler, args=(encoded,), daemon=True)
        engine.start()
        frontend, port = start(_run_frontend, encoded, traces)
        # The gateway lists its models once a second.
        uvloop.run(until_ready(port))
        gateway, port = start(_run_gateway, port, traces)
        uvloop.run(until_ready(port))
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        processes = {"frontend": frontend, "gateway": gateway}
        for unit, (connections, requests, tokens, turns) in _LOADS.items():
            units = turns * connections * requests * tokens
            found: dict[tuple[str, bool], list[float]] = defaultdict(list)
            for number in range(args.pairs + 1):
                for recorded in (False, True) if number % 2 else (True, False):
                    before = {name: _cpu_seconds(child.pid or 0) for name, child in processes.items()}
                    for _ in range(turns):
                        uvloop.run(_load(port, connections, requests, tokens, recorded=recorded))
                    time.sleep(_EXPORT_SECONDS)
                    for name, child in processes.items():
                        seconds = _cpu_seconds(child.pid or 0) - before[name]
                        found[name, recorded].append(seconds / units * 1e6)
            for name in processes:
                # The first measurement warms up.
                off, on = found[name, False][1:], found[name, True][1:]
                metrics[f"{name}_us_per_{unit}_off"] = statistics.median(off)
                metrics[f"{name}_us_per_{unit}_on"] = statistics.median(on)
                added = statistics.median(b / a for a, b in zip(off, on, strict=True)) - 1
                metrics[f"{name}_added_percent_per_{unit}"] = added * 100
        for child in (gateway, frontend, engine):
            child.kill()
            child.join()
    report("traces", metrics, {name: _TARGET_PERCENT for name in metrics if "percent" in name}, args.json)


if __name__ == "__main__":
    main()
