"""What each process of a group does: its configuration, and the call into its package.

Packages are imported inside the functions: a frontend's process must not import torch, nor a rank's the web framework.
Ranks and tokenizers run until the launcher ends them by a signal, so their `stop` events are never set. A rank 0 that
`drains` ends by itself once a signal has asked it to.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Final

import msgspec

from minisgl.engine.interface import Engine
from minisgl.launcher.child import Control
from minisgl.launcher.control import Ready
from minisgl.launcher.ranks import WorkerRankConfig, start_engine, start_rank0
from minisgl.wire.messages import ModelCard

_PHASES: Final = {"meet": "rendezvous", "load": "weights", "pool": "KV pool", "capture": "CUDA graphs"}


def rank0(raw: msgspec.Raw, control: Control) -> None:
    """The scheduler with the first engine."""
    from minisgl.scheduler import process

    config = msgspec.json.decode(raw, type=process.SchedulerProcessConfig)
    draining = threading.Event()
    if config.drains:
        signal.signal(signal.SIGTERM, lambda *_: draining.set())
        control.on_gave_up(lambda message: os._exit(1))
    transport = ""

    def create() -> Engine:
        nonlocal transport
        engine = start_rank0(config.engine, config.followers, EngineProgress(control))
        transport = engine.stats.transport
        return engine

    def ready(address: str, card: ModelCard) -> None:
        control.ready(Ready(transport, card.max_model_len, card.vocab_size))

    process.run(config, create, ready=ready, stop=threading.Event(), draining=draining)


def worker_rank(raw: msgspec.Raw, control: Control) -> None:
    """Run the engine of a worker rank."""
    from minisgl.engine import worker_rank

    config = msgspec.json.decode(raw, type=WorkerRankConfig)

    def create() -> Engine:
        engine = start_engine(config.engine, EngineProgress(control))
        control.ready()
        return engine

    worker_rank.run(config.plans, create, ready=lambda address: None, stop=threading.Event())


def tokenizer(raw: msgspec.Raw, control: Control) -> None:
    """A tokenizer worker."""
    from minisgl.router import worker
    from minisgl.router.config import TokenizerConfig

    worker.run(msgspec.json.decode(raw, type=TokenizerConfig), control.ready)


def frontend(raw: msgspec.Raw, control: Control) -> None:
    """The HTTP server."""
    from minisgl.frontend.config import FrontendConfig
    from minisgl.frontend.process import FrontendServer

    server = FrontendServer(msgspec.json.decode(raw, type=FrontendConfig))

    def fail(message: str) -> None:
        server.fail_all(message)
        # With every answer ended, the drain that this begins is over as soon as clients have read them.
        server.stop()

    # It tells of start and end, which the launcher does too.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # So it calls a stream that we broke off, about which we have logged what there is to say.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing response" not in record.getMessage()
    )
    control.on_gave_up(fail)
    server.run(lambda port: control.ready())


class EngineProgress:
    """Passes on how far an engine's start is, each percent once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._last = ""

    def __call__(self, phase: str, share: float) -> None:
        name = _PHASES.get(phase, phase)
        text = name if phase == "meet" else f"{name} {share:.0%}"
        if text != self._last:
            self._last = text
            self._control.progress(text)
