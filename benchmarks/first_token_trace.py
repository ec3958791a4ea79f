"""Hops of a request on an idle server, from the client to its first text: `python benchmarks/first_token_trace.py`.

Only the engine is a stub, which needs no time; HTTP, chat template, tokenizer, sockets and scheduler are real, each in
its own process. The functions where a request changes hands are wrapped; all processes read the machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Metric, report
from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits
from minisgl.flags.arguments import Parser, add_json_argument, integer
from minisgl.frontend.config import FrontendConfig
from minisgl.router.config import LocalEngine, TokenizerConfig
from minisgl.scheduler.process import SchedulerProcessConfig
from stub_engine import StubEngine

_START_SECONDS: Final = 60
_MAX_MODEL_LEN: Final = 16_384

HOPS: Final = {
    "read": "frontend: request read from the socket",
    "parsed": "frontend: body parsed, Generate to be sent",
    "generate": "tokenizer: Generate received",
    "encode": "tokenizer: encoding begins",
    "encoded": "tokenizer: prompt encoded",
    "submit": "tokenizer: Submit to be sent",
    "submitted": "scheduler: Submit received",
    "launch": "scheduler: step launched",
    "collected": "scheduler: result collected",
    "sent": "scheduler: Tokens to be sent",
    "tokens": "tokenizer: Tokens received",
    "texts": "tokenizer: Texts to be sent",
    "received": "frontend: Texts received",
    "first": "client: first text",
}
"""Hops in the order in which a request passes them."""


class Scenario(msgspec.Struct, frozen=True):
    """Configuration of all processes."""

    model: str
    folder: str
    tokenizers: int
    """Tokenizer processes; 0: a thread of the API process."""

    @property
    def scheduler_address(self) -> str:
        return f"ipc://{self.folder}/scheduler"

    @property
    def log(self) -> Path:
        return Path(self.folder, "hops")

    @property
    def worker(self) -> TokenizerConfig:
        return TokenizerConfig(
            engines=LocalEngine(scheduler_address=self.scheduler_address, model=self.model),
            frontend_address=f"ipc://{self.folder}/text",
        )


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Hops of a request on an idle server, with a stub engine.")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint with the tokenizer (default: a generated one)"
    )
    for flag, low, default, what in (
        ("--requests", 1, 30, "measured requests, one after the other"),
        ("--words", 1, 4, "words of the prompt"),
        ("--pause-ms", 0, 250, "milliseconds between two requests"),
        ("--tokenizers", 0, 1, "tokenizer processes, 0 or 1"),
    ):
        parser.add_argument(flag, type=integer(low), default=default, metavar="N", help=f"{what} (default: {default})")
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        scenario = Scenario(str(args.model or _tiny_model(Path(folder) / "model")), folder, min(args.tokenizers, 1))
        spans = measure(scenario, args.requests, args.words, args.pause_ms / 1000)
        hops = read_hops(scenario.log)
    metrics: dict[str, Metric] = {}
    hops["first"] = [first for _, first in spans]
    print(f"{'ms, p50':46} {'since sent':>10} {'since the hop before':>21}")
    before = [sent for sent, _ in spans]
    for name, title in HOPS.items():
        at = [_first_within(hops[name], *span) for span in spans]
        total = _median_ms(at, [sent for sent, _ in spans])
        print(f"{title:46} {total:10.3f} {_median_ms(at, before):21.3f}")
        metrics[f"{name}_ms"] = total
        before = at
    metrics["requests"], metrics["words"] = args.requests, args.words
    report("first-token-trace", metrics, {}, args.json)


def measure(scenario: Scenario, requests: int, words: int, pause: float) -> list[tuple[float, float]]:
    """Start all processes and send the requests. Returns when each was sent, and when its first text arrived."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    encoded = msgspec.json.encode(scenario)
    processes: list[BaseProcess] = [
        context.Process(target=_scheduler, args=(encoded,), daemon=True),
        context.Process(target=_frontend, args=(encoded, sender), daemon=True),
    ]
    if scenario.tokenizers:
        processes.append(context.Process(target=_tokenizer, args=(encoded,), daemon=True))
    for process in processes:
        process.start()
    # Without a writing end in this process, the exit of the frontend is an end of file here.
    sender.close()
    try:
        return asyncio.run(_send_all(int(receiver.recv_bytes()), requests, words, pause))
    finally:
        for process in reversed(processes):
            process.kill()
            process.join()


def read_hops(log: Path) -> dict[str, list[float]]:
    """Times of each hop, in order."""
    hops: dict[str, list[float]] = {}
    for line in log.read_text().splitlines():
        name, at = line.split()
        hops.setdefault(name, []).append(float(at))
    return hops


def _first_within(times: list[float], begin: float, end: float) -> float:
    return next(at for at in times if begin <= at <= end)


def _median_ms(ends: list[float], begins: list[float]) -> float:
    return statistics.median((end - begin) * 1000 for end, begin in zip(ends, begins, strict=True))


async def _send_all(port: int, requests: int, words: int, pause: float) -> list[tuple[float, float]]:
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                await endpoint.json("GET", "/ready")
                break
            except HttpError:
                await asyncio.sleep(0.05)
    spans = []
    for number in range(requests + 3):
        await asyncio.sleep(pause)
        body = {
            "messages": [{"role": "user", "content": f"{number} " + "word " * words}],
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": True,
        }
        sent, first = time.monotonic(), 0.0
        async with endpoint.stream("/v1/chat/completions", body) as events:
            async for event in events:
                if not first and b'"content":"' in event.data and b'"content":""' not in event.data:
                    first = time.monotonic()
        spans.append((sent, first))
    return spans[3:]


class _Log:
    """Writes the time of each hop to a file that all processes append to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, hop: str) -> None:
        os.write(self._file, f"{hop} {time.monotonic():.6f}\n".encode())

    def wrap(self, owner: Any, name: str, *, before: str = "", after: str = "", kind: type | None = None) -> None:
        """Log the calls of a function; with `kind`, only those with an argument of that type."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def logged(*args: Any, **keywords: Any) -> Any:
            counts = kind is None or any(isinstance(arg, kind) for arg in args)
            if before and counts:
                self.write(before)
            result = function(*args, **keywords)
            if after and counts:
                self.write(after)
            return result

        setattr(owner, name, logged)


def _wrap_tokenizer(log: _Log) -> None:
    from minisgl.router import router, worker
    from minisgl.router.dispatcher import Dispatcher
    from minisgl.router.link import Link
    from minisgl.wire.messages import Submit
    from minisgl.wire.text import Generate, Texts

    log.wrap(worker.Worker, "_enqueue", before="generate", kind=Generate)
    log.wrap(worker, "_encode", before="encode", after="encoded")
    log.wrap(router.Router, "send", before="submit", kind=Submit)
    log.wrap(Dispatcher, "tokens", before="tokens")
    log.wrap(Link, "send", before="texts", kind=Texts)


def _frontend(encoded: bytes, port: Connection) -> None:
    from minisgl.frontend import tokenizers
    from minisgl.frontend.process import FrontendServer
    from minisgl.frontend.server.connection import Connection as HttpConnection

    scenario = msgspec.json.decode(encoded, type=Scenario)
    log = _Log(scenario.log)
    log.wrap(HttpConnection, "on_message_begin", before="read")
    log.wrap(tokenizers.TokenizerPool, "submit", before="parsed")
    log.wrap(tokenizers._Link, "_on_texts", before="received")
    if not scenario.tokenizers:
        _wrap_tokenizer(log)
    config = FrontendConfig(
        port=0,
        tokenizer_addresses=(scenario.worker.frontend_address,),
        tokenizer=None if scenario.tokenizers else scenario.worker,
    )
    FrontendServer(config).run(lambda number: port.send_bytes(b"%d" % number))


def _tokenizer(encoded: bytes) -> None:
    from minisgl.router import worker

    scenario = msgspec.json.decode(encoded, type=Scenario)
    _wrap_tokenizer(_Log(scenario.log))
    worker.run(scenario.worker)


def _scheduler(encoded: bytes) -> None:
    from minisgl.scheduler import process, server
    from minisgl.scheduler.clients import Clients
    from minisgl.tokenizer.model_files import load_model_files
    from minisgl.wire.messages import Submit

    scenario = msgspec.json.decode(encoded, type=Scenario)
    log = _Log(scenario.log)
    log.wrap(server, "_handle_message", before="submitted", kind=Submit)
    log.wrap(StubEngine, "launch", before="launch")
    log.wrap(StubEngine, "collect", after="collected")
    log.wrap(Clients, "send_step", before="sent")
    files = load_model_files(scenario.model)
    limits = EngineLimits(
        num_pages=_MAX_MODEL_LEN,
        page_size=16,
        max_running=256,
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=files.tokenizer.get_vocab_size(),
        eos_token_ids=(),
    )
    config = SchedulerProcessConfig(
        engine=EngineConfig(model=scenario.model),
        address=scenario.scheduler_address,
        model_name="stub",
        tokenizer_hashes=files.hashes,
    )
    process.run(config, lambda: StubEngine(limits), ready=lambda address, card: None, stop=threading.Event())


def _tiny_model(folder: Path) -> Path:
    from minisgl.toy.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(folder, "qwen3")


if __name__ == "__main__":
    main()
