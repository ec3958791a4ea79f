"""What each process of a group does: its configuration, and the call into its room.

Rooms are imported inside the functions: a frontend's process must not import torch, nor a rank's the web framework.
Ranks and tokenizers run until the launcher ends them by a signal, so their `stop` events are never set.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

import msgspec

from minisgl.engine.interface import Engine
from minisgl.launcher.child import Control
from minisgl.launcher.ranks import FollowerConfig, start_rank0

_PHASES: Final = {"load": "weights", "pool": "KV pool", "capture": "CUDA graphs"}


def rank0(raw: msgspec.Raw, control: Control) -> None:
    """The scheduler with the first engine."""
    from minisgl.scheduler import process

    config = msgspec.json.decode(raw, type=process.SchedulerProcessConfig)
    process.run(
        config,
        lambda: start_rank0(config.engine, config.followers, EngineProgress(control)),
        ready=lambda address, card: control.ready(),
        stop=threading.Event(),
    )


def follower(raw: msgspec.Raw, control: Control) -> None:
    """The engine of a rank above 0."""
    from minisgl.engine import follower
    from minisgl.engine.engine import create_engine

    config = msgspec.json.decode(raw, type=FollowerConfig)

    def create() -> Engine:
        engine = create_engine(config.engine, EngineProgress(control))
        control.ready()
        return engine

    follower.run(config.plans, create, ready=lambda address: None, stop=threading.Event())


def tokenizer(raw: msgspec.Raw, control: Control) -> None:
    """A tokenizer worker."""
    from minisgl.tokenizer import worker
    from minisgl.tokenizer.config import TokenizerConfig

    worker.run(msgspec.json.decode(raw, type=TokenizerConfig), control.ready)


def frontend(raw: msgspec.Raw, control: Control) -> None:
    """The HTTP server."""
    from minisgl.frontend.config import FrontendConfig
    from minisgl.frontend.server import FrontendServer

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
        text = f"{_PHASES.get(phase, phase)} {share:.0%}"
        if text != self._last:
            self._last = text
            self._control.progress(text)
