"""Tokens that the API and tokenizer processes forward per second of their CPU time: `python benchmarks/frontend.py`.

Only the engine is a stub, with a constant time per step; HTTP, chat template, detokenization, sockets and scheduler are
real. The client in this process counts the events of all streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from io import BufferedReader
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import uvloop

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.report import Metric, report
from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits
from minisgl.flags.arguments import Parser, add_json_argument, integer, number
from minisgl.frontend.config import FrontendConfig
from minisgl.router.config import LocalEngine, TokenizerConfig
from minisgl.scheduler.process import SchedulerProcessConfig
from minisgl.wire.plan import StepPlan, StepResult
from stub_engine import StubEngine

TARGET: Final = 25_000
METRICS_TARGET_MS: Final = 2.0
_PAGE_SIZE: Final = 16
_PROMPT_TOKENS: Final = 128
_MARGIN_SECONDS: Final = 1.0
"""Not measured at the beginning and the end, while streams start and finish one after the other."""
_METRICS_INTERVAL_SECONDS: Final = 0.1
_START_SECONDS: Final = 60


class Scenario(msgspec.Struct, frozen=True):
    """Configuration of one run, for all processes."""

    model: str
    folder: str
    streams: int
    step_ms: float
    seconds: float
    tokenizers: int
    """Tokenizer processes; 0: a thread of the API process."""

    @property
    def tokens_per_stream(self) -> int:
        return int((self.seconds + 2 * _MARGIN_SECONDS) * 1000 / self.step_ms)

    @property
    def scheduler_address(self) -> str:
        return f"ipc://{self.folder}/scheduler"

    @property
    def workers(self) -> list[TokenizerConfig]:
        return [
            TokenizerConfig(
                engines=LocalEngine(scheduler_address=self.scheduler_address, model=self.model),
                frontend_address=f"ipc://{self.folder}/text{index}",
                name=f"tokenizer{index}",
            )
            for index in range(max(1, self.tokenizers))
        ]


class Measurement(NamedTuple):
    """Result of one run."""

    tokens: int
    """Events during the measurement."""
    seconds: float
    cpu_seconds: float
    events_per_token: float
    """Mean over whole answers; 1 if no two tokens shared an event."""
    metrics_ms: list[float]
    """Response times of /metrics, in milliseconds."""

    @property
    def tokens_per_core_second(self) -> float:
        return self.tokens / self.cpu_seconds


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Tokens per CPU second of API and tokenizers, with a stub engine.")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint with the tokenizer (default: a generated one)",
    )
    parser.add_argument(
        "--streams", type=integer(1), default=256, metavar="N", help="concurrent streams (default: 256 streams)"
    )
    parser.add_argument(
        "--step-ms",
        type=number(0),
        default=30.0,
        metavar="MS",
        help="time of an engine step, which is one token per stream (default: 30 ms)",
    )
    parser.add_argument(
        "--seconds", type=number(0), default=8.0, metavar="S", help="length of the measurement (default: 8 seconds)"
    )
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    metrics: dict[str, Metric] = {}
    page_ms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        model = args.model or tiny_model(Path(folder) / "model")
        for tokenizers in (0, 1):
            sockets = Path(folder) / f"sockets{tokenizers}"
            sockets.mkdir()
            measured = measure(Scenario(str(model), str(sockets), args.streams, args.step_ms, args.seconds, tokenizers))
            name = f"{tokenizers}_tokenizers"
            metrics[f"tokens_per_core_second_{name}"] = measured.tokens_per_core_second
            metrics[f"tokens_per_second_{name}"] = measured.tokens / measured.seconds
            metrics[f"events_per_token_{name}"] = measured.events_per_token
            page_ms += measured.metrics_ms
    metrics = {"tokens_per_core_second": metrics["tokens_per_core_second_1_tokenizers"], **metrics}
    if page_ms:
        metrics["metrics_ms_p50"] = statistics.median(page_ms)
        metrics["metrics_ms_max"] = max(page_ms)
    metrics["streams"], metrics["step_ms"] = args.streams, args.step_ms
    report("frontend", metrics, {"tokens_per_core_second": TARGET, "metrics_ms_p50": METRICS_TARGET_MS}, args.json)


def measure(scenario: Scenario) -> Measurement:
    """Start all processes, run the streams and measure. Raises HttpError when a stream fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    encoded = msgspec.json.encode(scenario)
    measured: list[BaseProcess] = [context.Process(target=_frontend, args=(encoded, sender), daemon=True)]
    measured += [
        context.Process(target=_tokenizer, args=(encoded, index), daemon=True) for index in range(scenario.tokenizers)
    ]
    scheduler = context.Process(target=run_scheduler, args=(encoded,), daemon=True)
    poller, poller_end = context.Pipe()
    metrics = context.Process(target=_poll_metrics, args=(encoded, poller_end), daemon=True)
    processes = [scheduler, *measured, metrics]
    for process in processes:
        process.start()
    # Without a writing end in this process, the exit of the frontend is an end of file here.
    sender.close()
    poller_end.close()
    try:
        port = int(receiver.recv_bytes())
        poller.recv_bytes()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(_load(scenario, port, [_pid(p) for p in measured], poller))
            except* HttpError as failures:
                # All streams fail for the same reason.
                raise _first(failures) from None
    finally:
        # The scheduler last: the other processes would log its exit.
        for process in reversed(processes):
            process.kill()
            process.join()


def tiny_model(folder: Path) -> Path:
    from minisgl.toy.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(folder, "qwen3")


def _frontend(encoded: bytes, port: Connection) -> None:
    from minisgl.frontend.process import FrontendServer

    scenario = msgspec.json.decode(encoded, type=Scenario)
    workers = scenario.workers
    config = FrontendConfig(
        port=0,
        tokenizer_addresses=tuple(worker.frontend_address for worker in workers),
        tokenizer=None if scenario.tokenizers else workers[0],
    )
    FrontendServer(config).run(lambda number: port.send_bytes(b"%d" % number))


def _tokenizer(encoded: bytes, index: int) -> None:
    from minisgl.router import worker

    worker.run(msgspec.json.decode(encoded, type=Scenario).workers[index])


def run_scheduler(encoded: bytes) -> None:
    from minisgl.scheduler import process
    from minisgl.tokenizer.model_files import load_model_files

    scenario = msgspec.json.decode(encoded, type=Scenario)
    files = load_model_files(scenario.model)
    length = _PROMPT_TOKENS + scenario.tokens_per_stream
    limits = EngineLimits(
        num_pages=scenario.streams * -(-length // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
        max_running=scenario.streams,
        max_model_len=length,
        vocab_size=files.tokenizer.get_vocab_size(),
        eos_token_ids=(),
    )
    words = [token for text, token in sorted(files.tokenizer.get_vocab().items()) if text.isascii() and text.isalpha()]
    config = SchedulerProcessConfig(
        engine=EngineConfig(model=scenario.model),
        address=scenario.scheduler_address,
        model_name="stub",
        tokenizer_hashes=files.hashes,
    )
    engine = _TimedStubEngine(limits, words, scenario.step_ms / 1000)
    process.run(config, lambda: engine, ready=lambda address, card: None, stop=threading.Event())


class _TimedStubEngine(StubEngine):
    """Samples a different sequence of `words`, tokens that are whole words, in every row; a step takes `seconds`."""

    def __init__(self, limits: EngineLimits, words: list[int], seconds: float) -> None:
        super().__init__(limits)
        self._words = np.array(words, np.int32)
        self._seconds = seconds
        self._next = 0.0

    def collect(self, handle: StepPlan) -> StepResult:
        now = time.monotonic()
        time.sleep(max(0.0, self._next - now))
        self._next = max(self._next, now) + self._seconds
        slots = np.asarray(handle.sampled_slots)
        return StepResult(handle.step, self._words[(slots + handle.step) % len(self._words)])


class _Count:
    """Events and tokens that all streams have received."""

    def __init__(self) -> None:
        self.events = 0
        self.tokens = 0


async def _load(scenario: Scenario, port: int, pids: list[int], metrics: Connection) -> Measurement:
    """Run the streams and measure the CPU time of processes `pids`; `metrics` is the pipe to `_poll_metrics`."""
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    await _until_ready(endpoint)
    count = _Count()
    async with asyncio.TaskGroup() as streams:
        for index in range(scenario.streams):
            streams.create_task(_stream(scenario, endpoint, index, count))
        while count.events < 2 * scenario.streams:
            await asyncio.sleep(0.05)
        await asyncio.sleep(_MARGIN_SECONDS / 2)
        began, events, cpu = time.perf_counter(), count.events, sum(map(_cpu_seconds, pids))
        metrics.send_bytes(b"%d" % port)
        await asyncio.sleep(scenario.seconds)
        seconds = time.perf_counter() - began
        events, cpu = count.events - events, sum(map(_cpu_seconds, pids)) - cpu
    metrics_ms = msgspec.json.decode(metrics.recv_bytes(), type=list[float])
    return Measurement(events, seconds, cpu, count.events / count.tokens, metrics_ms)


async def _until_ready(endpoint: Endpoint) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                await endpoint.json("GET", "/ready")
                return
            except HttpError:
                await asyncio.sleep(0.05)


async def _stream(scenario: Scenario, endpoint: Endpoint, index: int, count: _Count) -> None:
    body = {
        "messages": [{"role": "user", "content": f"Stream number {index}"}],
        "max_tokens": scenario.tokens_per_stream,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with endpoint.request("POST", "/v1/chat/completions", body) as response:
        if response.status != 200:
            response.raise_for_status(await response.read())
        before = tail = b""
        async for _, chunk in response.chunks():
            # Much cheaper than parsing: the client shares the machine with the measured processes.
            count.events += (before[-1:] + chunk).count(b"\n\n")
            tail = (tail + chunk)[-2000:]
            before = chunk
        # Four events without a token: the role, the finish reason, the usage and [DONE].
        count.events -= 4
        usage = tail[tail.rindex(b"data: {") : tail.rindex(b"data: [DONE]")]
        count.tokens += json.loads(usage[6:])["usage"]["completion_tokens"]


def _poll_metrics(encoded: bytes, pipe: Connection) -> None:
    """Receive a port, poll its /metrics while the streams run, and send the response times in milliseconds; none if
    there is no such page. This is a process of its own because the one that reads the streams is busy, and uses no HTTP
    library, whose time to parse the headers would be measured too."""
    seconds = msgspec.json.decode(encoded, type=Scenario).seconds
    pipe.send_bytes(b"started")
    answers: list[float] = []
    with (
        socket.create_connection(("127.0.0.1", int(pipe.recv_bytes())), _START_SECONDS) as connection,
        connection.makefile("rb") as pages,
    ):
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            if not _read_page(pages):
                break
            answers.append((time.perf_counter() - began) * 1000)
            time.sleep(_METRICS_INTERVAL_SECONDS)
    pipe.send_bytes(msgspec.json.encode(answers))


def _read_page(answers: BufferedReader) -> bool:
    """Read an answer to its last byte; returns True if it has status 200 and is complete."""
    found = answers.readline().startswith(b"HTTP/1.1 200 ")
    length = 0
    while (line := answers.readline()) != b"\r\n":
        if not line:
            raise ConnectionError("the server closed the connection")
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return found and len(answers.read(length)) == length


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
