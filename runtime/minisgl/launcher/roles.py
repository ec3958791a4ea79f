"""Targets of the launcher's children: each decodes its configuration and calls its package.

Packages are imported inside the functions: the process of a frontend must not import torch, nor that of a rank the web
framework. Ranks and tokenizer workers run until the launcher kills them, so their `stop` events are never set. A rank 0
that `drains` exits by itself after SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec

from minisgl.engine.interface import Engine, EngineStats
from minisgl.engine.watched_engine import WatchedEngine
from minisgl.launcher.child import Control
from minisgl.launcher.control import Ready
from minisgl.launcher.ranks import WorkerRankConfig, constraint_compiler, start_engine, start_rank0
from minisgl.wire.messages import ModelCard

if TYPE_CHECKING:
    from minisgl.router.config import TokenizerConfig

_PHASES: Final = {"meet": "rendezvous", "load": "weights", "pool": "KV pool", "capture": "CUDA graphs"}


def rank0(raw: msgspec.Raw, control: Control) -> None:
    """Run the scheduler and the engine of rank 0."""
    from minisgl.hub.model_revision import model_revision
    from minisgl.scheduler import process

    config = msgspec.json.decode(raw, type=process.SchedulerProcessConfig)
    draining = threading.Event()
    if config.drains:
        signal.signal(signal.SIGTERM, lambda *_: draining.set())
        control.on_gave_up(lambda message: os._exit(1))
    stats: EngineStats

    def create() -> Engine:
        nonlocal stats
        rank = start_rank0(config.engine, config.plan_addresses, EngineProgress(control), token=config.plans_token)
        engine = WatchedEngine(rank)
        stats = engine.stats
        control.watch_steps(engine, on_cpu=config.engine.device == "cpu")
        return engine

    def ready(address: str, card: ModelCard) -> None:
        length, vocabulary = card.max_model_len, card.vocab_size
        control.ready(Ready(stats.transport, length, vocabulary, card.task, stats.attention, stats.data_types))

    compiler = constraint_compiler(config.engine)
    if compiler is not None:
        # Reading the tokenizer keeps the interpreter lock for about a second, which must not be while requests run.
        compiler.begin()
    # At each start, as the files may have been replaced since the last one; beside the load, which takes longer.
    pool = ThreadPoolExecutor(1, thread_name_prefix="revision")
    revision = pool.submit(model_revision, config.engine.model, dummy_weights=config.engine.dummy_weights)
    pool.shutdown(wait=False)
    process.run(
        config,
        create,
        ready=ready,
        stop=threading.Event(),
        draining=draining,
        compiler=compiler,
        model_revision=revision.result,
    )


def worker_rank(raw: msgspec.Raw, control: Control) -> None:
    """Run the engine of a worker rank."""
    from minisgl.engine import worker_rank

    config = msgspec.json.decode(raw, type=WorkerRankConfig)

    def create() -> Engine:
        engine = WatchedEngine(start_engine(config.engine, EngineProgress(control)))
        control.watch_steps(engine, on_cpu=config.engine.device == "cpu")
        control.ready()
        return engine

    worker_rank.run(config.plans, create, ready=lambda address: None, stop=threading.Event(), token=config.token)


def tokenizer(raw: msgspec.Raw, control: Control) -> None:
    """Run a tokenizer worker."""
    from minisgl.router import worker
    from minisgl.router.config import TokenizerConfig

    config = msgspec.json.decode(raw, type=TokenizerConfig)
    _try_local_files(config)
    worker.run(config, control.ready)


def frontend(raw: msgspec.Raw, control: Control) -> None:
    """Run the HTTP server."""
    from minisgl.frontend.config import FrontendConfig
    from minisgl.frontend.process import FrontendServer

    config = msgspec.json.decode(raw, type=FrontendConfig)
    if config.tokenizer is not None:
        _try_local_files(config.tokenizer)
    server = FrontendServer(config)

    def fail(message: str) -> None:
        server.fail_all(message)
        # All responses have ended, so the drain that this starts takes until clients have read them.
        server.stop()

    # It logs start and stop, as the launcher does.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # It logs each stream that we aborted, which our own line explains better.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing response" not in record.getMessage()
    )
    control.on_gave_up(fail)
    server.run(lambda port: control.ready())


def _try_local_files(config: TokenizerConfig) -> None:
    """Raises TokenizerError. The only other thread waits for the launcher."""
    from minisgl.router.config import LocalEngine
    from minisgl.tokenizer.trial import try_files

    if isinstance(config.engines, LocalEngine):
        try_files(config.engines.model, fork=True)


class EngineProgress:
    """Reports the progress of an engine's start, each percent once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._last = ""

    def __call__(self, phase: str, share: float) -> None:
        name = _PHASES.get(phase, phase)
        text = name if phase == "meet" else f"{name} {share:.0%}"
        if text != self._last:
            self._last = text
            self._control.progress(text)
