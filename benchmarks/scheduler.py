"""CPU time of the whole scheduler process per decode step: `python benchmarks/scheduler.py [--json FILE]`.

Only the engine is a stub; sockets, radix cache, plans and result messages are real, and each plan is packed for the
device as an engine does it. The stub engine returns at once, so that the scheduler is never idle. This process is the
client that reads its messages. In the last run all requests have penalties and filters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch
import zmq

from minisgl.bench.report import report
from minisgl.config import EngineConfig
from minisgl.engine.batch import PackedStep
from minisgl.engine.interface import EngineLimits
from minisgl.engine.tables import Tables
from minisgl.flags.arguments import Parser, add_json_argument, integer
from minisgl.scheduler.clients import Clients
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.server import serve
from minisgl.wire.messages import WIRE_VERSION, FromScheduler, Hello, ModelCard, SamplingParams, Submit, Tokens, Welcome
from minisgl.wire.plan import StepPlan
from minisgl.wire.sockets import Codec, open_socket
from stub_engine import StubEngine

VOCAB_SIZE: Final = 151_936
PREFIX_PAGES: Final = 16
TARGET_MS: Final = 0.30
TARGET_50K_MS: Final = 0.36
WARM_UP_STEPS: Final = 200
MINI_SGLANG_MS: Final = 4.8
"""CPU time of mini-sglang with pages of 256 tokens, its better case; 6.5 ms with pages of one token."""


class Scenario(msgspec.Struct, frozen=True):
    """Load of the scheduler process during a measurement."""

    address: str
    running: int
    steps: int
    page_size: int
    prefixes: int
    """Prompts that fill the prefix cache first; 0: none."""
    processed: bool = False
    """Each request has penalties, top-k and top-p."""

    @property
    def max_tokens(self) -> int:
        return self.steps + 2 * WARM_UP_STEPS

    @property
    def prompt_lengths(self) -> list[int]:
        """Staggered, so that about the same number of rows needs a new page in every step."""
        return [64 + row % 61 for row in range(self.running)]

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool. With prefixes, they fill it, so that running requests evict pages; without, nothing is
        evicted."""
        pages_at_end = sum(-(-(length + self.max_tokens) // self.page_size) for length in self.prompt_lengths)
        return self.prefixes * PREFIX_PAGES if self.prefixes else pages_at_end


class Measurement(msgspec.Struct, frozen=True):
    """Result of one scenario, per decode step."""

    cpu_ms: float
    wall_ms: float
    evictions_per_step: float
    steps_without_eviction: int
    cached_prefixes: int


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="CPU time of the scheduler per step, with a stub engine.")
    for flag, low, default, what in (
        ("--running", 1, 256, "decoding requests"),
        ("--steps", 1, 2000, "measured decode steps"),
        ("--page-size", 1, 16, "tokens per page"),
        ("--prefixes", 1, 50_000, "cached prefixes in the second run"),
    ):
        parser.add_argument(flag, type=integer(low), default=default, metavar="N", help=f"{what} (default: {default})")
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    metrics: dict[str, float | int] = {}
    plain = measure(args.running, args.steps, args.page_size, 0)
    metrics["decode_step_cpu_ms"] = plain.cpu_ms
    metrics["decode_step_wall_ms"] = plain.wall_ms
    full = measure(args.running, args.steps, args.page_size, args.prefixes)
    metrics["decode_step_cpu_ms_50k_prefixes"] = full.cpu_ms
    metrics["decode_step_wall_ms_50k_prefixes"] = full.wall_ms
    metrics["ratio_50k_prefixes_to_plain"] = full.cpu_ms / plain.cpu_ms
    metrics["ratio_reference_system_to_ours"] = MINI_SGLANG_MS / plain.cpu_ms
    metrics["evicted_pages_per_step"] = full.evictions_per_step
    metrics["steps_without_eviction"] = full.steps_without_eviction
    metrics["cached_prefixes_at_end"] = full.cached_prefixes
    metrics["running"], metrics["steps"], metrics["page_size"] = args.running, args.steps, args.page_size
    processed = measure(args.running, args.steps, args.page_size, 0, processed=True)
    metrics["decode_step_cpu_ms_processed"] = processed.cpu_ms
    metrics["ratio_processed_to_plain"] = processed.cpu_ms / plain.cpu_ms
    reference = {"decode_step_cpu_ms": TARGET_MS, "decode_step_cpu_ms_50k_prefixes": TARGET_50K_MS}
    report("scheduler", metrics, reference, args.json)


def measure(running: int, steps: int, page_size: int, prefixes: int, *, processed: bool = False) -> Measurement:
    """Run a scheduler process and load it until it has measured `steps` decode steps."""
    # Running requests evict prefixes as they grow: add enough for `prefixes` to remain at the end.
    growth = running * (steps + 2 * WARM_UP_STEPS + 256) // page_size if prefixes else 0
    filled = prefixes + -(-growth // PREFIX_PAGES)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        scenario = Scenario(f"ipc://{folder}/scheduler", running, steps, page_size, filled, processed)
        process = context.Process(target=_scheduler_process, args=(msgspec.json.encode(scenario), sender), daemon=True)
        process.start()
        # Without a writing end in this process, the exit of the scheduler process is an end of file here.
        sender.close()
        try:
            _client(scenario, receiver)
            return msgspec.json.decode(receiver.recv_bytes(), type=Measurement)
        finally:
            process.kill()
            process.join()


class _MeasuredEngine(StubEngine):
    """Packs each plan, reads the CPU clock of the process before and after `steps` decode steps of a full batch, then
    sets `stop`."""

    def __init__(self, limits: EngineLimits, scenario: Scenario, stop: threading.Event) -> None:
        super().__init__(limits)
        self._scenario = scenario
        self._stop = stop
        self.full_steps = 0
        self.start = self.end = (0.0, 0.0)
        self.evicted_at_start = self.evicted_at_end = 0
        self.steps_without_eviction = 0
        self.scheduler: Scheduler | None = None
        self._evicted = 0
        pages_per_row = -(-limits.max_model_len // limits.page_size)
        self._tables = Tables(limits.max_running, pages_per_row, 0, limits.vocab_size, torch.device("cpu"))
        self._buffer = np.empty(1 << 20, np.int32)

    def launch(self, plan: StepPlan) -> StepPlan:
        if len(plan.decode_slots) == self._scenario.running:
            self._mark()
        packed = PackedStep(plan, self._tables)
        packed.write(self._buffer[: packed.size])
        return super().launch(plan)

    def _mark(self) -> None:
        assert self.scheduler is not None
        self.full_steps += 1
        evicted = self.scheduler.counters.evicted_pages
        if self.full_steps > WARM_UP_STEPS + 1 and evicted == self._evicted:
            self.steps_without_eviction += 1
        self._evicted = evicted
        if self.full_steps == WARM_UP_STEPS + 1:
            self.start, self.evicted_at_start = (time.process_time(), time.perf_counter()), evicted
        elif self.full_steps == WARM_UP_STEPS + 1 + self._scenario.steps:
            self.end, self.evicted_at_end = (time.process_time(), time.perf_counter()), evicted
            self._stop.set()


def _scheduler_process(encoded: bytes, result: Connection) -> None:
    """Serve until the measurement is complete, then send it."""
    scenario = msgspec.json.decode(encoded, type=Scenario)
    limits = EngineLimits(
        num_pages=scenario.num_pages,
        page_size=scenario.page_size,
        max_running=scenario.running,
        max_model_len=max(scenario.prompt_lengths) + scenario.max_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(VOCAB_SIZE - 1,),
    )
    config = scheduler_config(EngineConfig(model=""), limits)
    card = ModelCard(
        name="stub",
        revision="",
        max_model_len=limits.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=limits.eos_token_ids,
        tokenizer_hashes={},
    )
    stop = threading.Event()
    engine = _MeasuredEngine(limits, scenario, stop)
    engine.scheduler = scheduler = Scheduler(config)
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(context, scenario.address, card, (0, 0))
    result.send_bytes(b"listening")
    serve(StepLoop(scheduler, engine), clients, stop)
    steps = scenario.steps
    cache = scheduler.pages.cache
    assert isinstance(cache, RadixCache)
    measurement = Measurement(
        cpu_ms=(engine.end[0] - engine.start[0]) / steps * 1000,
        wall_ms=(engine.end[1] - engine.start[1]) / steps * 1000,
        evictions_per_step=(engine.evicted_at_end - engine.evicted_at_start) / steps,
        steps_without_eviction=engine.steps_without_eviction,
        cached_prefixes=sum(1 for node in cache.nodes() if not node.children),
    )
    result.send_bytes(msgspec.json.encode(measurement))


def _client(scenario: Scenario, result: Connection) -> None:
    """Fill the cache, submit the running requests, and read tokens until the measurement arrives."""
    assert result.recv_bytes() == b"listening"
    context: zmq.Context[Any] = zmq.Context()
    socket = open_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(scenario.address)
    codec: Codec[FromScheduler] = Codec(FromScheduler)
    try:
        socket.send(codec.encode(Hello(WIRE_VERSION, "bench")))
        assert isinstance(codec.decode(socket.recv()), Welcome)
        draw = np.random.default_rng(0)
        finished = 0
        for number in range(scenario.prefixes):
            prompt = draw.integers(0, VOCAB_SIZE - 1, PREFIX_PAGES * scenario.page_size, dtype=np.int32)
            _submit(socket, codec, number, prompt, 1)
            if number - finished >= 512:
                finished += _receive_finished(socket, codec)
        while finished < scenario.prefixes:
            finished += _receive_finished(socket, codec)
        for row, length in enumerate(scenario.prompt_lengths):
            prompt = draw.integers(0, VOCAB_SIZE - 1, length, dtype=np.int32)
            _submit(socket, codec, scenario.prefixes + row, prompt, scenario.max_tokens, processed=scenario.processed)
        while not result.poll(0):
            if socket.poll(100):
                codec.decode(socket.recv())
    finally:
        context.destroy(linger=0)


def _submit(
    socket: Any,
    codec: Codec[FromScheduler],
    number: int,
    prompt: np.ndarray[Any, Any],
    tokens: int,
    *,
    processed: bool = False,
) -> None:
    params = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
    if processed:
        params = msgspec.structs.replace(params, top_k=20, top_p=0.95, presence_penalty=1.0, frequency_penalty=0.2)
    socket.send(codec.encode(Submit(id=number.to_bytes(16, "big"), prompt=prompt.tobytes(), params=params)))


def _receive_finished(socket: Any, codec: Codec[FromScheduler]) -> int:
    """Receive one message; returns the number of requests that it finishes."""
    message = codec.decode(socket.recv())
    return sum(map(bool, message.finish)) if isinstance(message, Tokens) else 0


if __name__ == "__main__":
    main()
