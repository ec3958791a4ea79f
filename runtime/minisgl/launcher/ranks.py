"""Start the engine of a rank in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minisgl.config import EngineConfig
from minisgl.engine.interface import Engine
from minisgl.launcher.devices import open_device

if TYPE_CHECKING:
    from minisgl.grammar.grammars import Grammars
    from minisgl.scheduler.compiling import ConstraintCompiler

logger = logging.getLogger(__name__)


class WorkerRankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a worker rank's process."""

    engine: EngineConfig
    plans: str
    """Address on which it receives the step plans of rank 0."""
    token: str = ""
    """See `PlanReceiver`."""


def start_engine(config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> Engine:
    """Start the engine of any rank. Raises the errors of `create_engine`."""
    began = time.monotonic()
    if config.device == "cuda":
        open_device(config.rank if config.device_index is None else config.device_index)
    from minisgl.engine.engine import create_engine

    imports = time.monotonic() - began
    engine = create_engine(config, progress)
    phases = engine.stats.start_seconds = {"imports": imports, **engine.stats.start_seconds}
    logger.info(
        "engine ready after %.1f s",
        sum(phases.values()),
        extra={phase: round(seconds, 2) for phase, seconds in phases.items()},
    )
    return engine


def constraint_compiler(config: EngineConfig) -> ConstraintCompiler | None:
    """Compiler of grammars over the checkpoint's vocabulary; None without a tokenizer, or if the model does not
    generate. Raises ModelError."""
    from minisgl.models.config import ModelConfig
    from minisgl.models.pooling_files import read_pooling
    from minisgl.scheduler.compiling import ConstraintCompiler

    if not Path(config.model, "tokenizer.json").is_file():
        return None
    model = ModelConfig.read(config.model, config.hf_overrides, config.quantization)
    if read_pooling(config.model, model, config.task) is not None:
        return None

    def create() -> Grammars:
        from minisgl.grammar.grammars import Grammars

        return Grammars(config.model, model.vocab_size, model.eos_token_ids)

    return ConstraintCompiler(create)


def start_rank0(
    config: EngineConfig,
    plans: Sequence[str],
    progress: Callable[[str, float], None] | None = None,
    *,
    token: str = "",
) -> Engine:
    """Start the engine of rank 0; `plans` are the addresses of the worker ranks, in order, and `token` is that of
    `PlanBroadcast`. Raises the errors of
    `create_engine`."""
    engine = start_engine(config, progress)
    if not plans:
        return engine
    import zmq

    from minisgl.engine.broadcast import PlanBroadcast, TensorParallelEngine

    return TensorParallelEngine(engine, PlanBroadcast(zmq.Context.instance(), plans, token))
