"""Entry point of rank 0's process: start the engine, configure the scheduler from its sizes, serve."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from minisgl.config import EngineConfig, SchedulerConfig
from minisgl.engine.interface import Engine, EngineLimits
from minisgl.errors import describe
from minisgl.scheduler.clients import Clients
from minisgl.scheduler.compiling import ConstraintCompiler
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.server import serve
from minisgl.wire.messages import Failed, ModelCard
from minisgl.wire.peer_secret import PeerSecret

_LAST_ANSWERS_MS: Final = 2000
"""Time for the last messages of a drained scheduler to leave."""


class SchedulerProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of rank 0's process, written by the launcher."""

    engine: EngineConfig
    address: str
    """Address for clients: `ipc://…` or `tcp://…`."""
    plan_addresses: tuple[str, ...] = ()
    """Addresses on which ranks 1, 2, … receive plans, in this order."""
    model_name: str
    replica: str = ""
    replica_revision: str = ""
    """Revision of the replica, see `Welcome.revision`."""
    peer_secret: str = ""
    """Directory with the tokens of the model's pods, see PeerSecret; empty: none."""
    peer_secret_demand: str = ""
    """File whose age shows whether the launcher requires them; used with a directory."""
    plans_token: str = ""
    """Token of the connections to worker ranks; empty: only rank 0 can reach them."""
    drains: bool = False
    """SIGTERM makes the process drain instead of stop."""
    tokenizer_hashes: dict[str, str] = {}
    epoch: tuple[int, int] = (0, 0)
    max_waiting: int = 1 << 20


def pack_epoch(epoch: tuple[int, int]) -> int:
    """(boot time in ms, counter) as one ordered integer below 2⁶²."""
    boot_ms, counter = epoch
    return boot_ms << 16 | counter & 0xFFFF


def scheduler_config(engine: EngineConfig, limits: EngineLimits) -> SchedulerConfig:
    """Configuration of the scheduler for an engine with these `limits`, which was started with `engine`."""
    whole_text = limits.max_model_len if limits.pooling is not None and limits.pooling.whole_texts else 0
    return SchedulerConfig(
        **msgspec.structs.asdict(limits),
        max_step_tokens=max(engine.max_step_tokens, whole_text),
        target_itl_ms=engine.target_itl_ms,
        overlap=engine.overlap,
        cache="naive" if whole_text else engine.cache,
        audit=engine.audit,
    )


def run(
    config: SchedulerProcessConfig,
    create_engine: Callable[[], Engine],
    *,
    ready: Callable[[str, ModelCard], None],
    stop: threading.Event,
    draining: threading.Event | None = None,
    compiler: ConstraintCompiler | None = None,
    model_revision: Callable[[], str] = lambda: "",
) -> None:
    """Serve until `stop` is set, or until the end of the drain that begins once `draining` is set. Without `compiler`,
    requests with a grammar are refused. `model_revision` returns that of the model card, and is called
    when the engine has started.

    `ready` is called with the bound address and the model card once clients can connect. Exceptions of a step are
    sent to all clients and raised; the engine is not closed then, since a broken device may not return, and the process
    must exit.
    """
    engine = create_engine()
    failed = False
    context: zmq.Context[Any] = zmq.Context()
    try:
        limits = engine.limits
        card = ModelCard(
            name=config.model_name,
            revision=model_revision(),
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            tokenizer_hashes=config.tokenizer_hashes,
            task=limits.task,
            output_size=0 if limits.pooling is None else limits.pooling.size,
            labels=() if limits.pooling is None else limits.pooling.labels,
        )
        clients = Clients(
            context,
            config.address,
            card,
            config.epoch,
            replica=config.replica,
            revision=config.replica_revision,
            secret=PeerSecret(config.peer_secret, Path(config.peer_secret_demand)),
        )
        linger_ms = 0
        try:
            settings = scheduler_config(config.engine, limits)
            if limits.pooling is None:
                # Frontends limit texts to pool by their tokens: one request may have thousands of short ones.
                settings = msgspec.structs.replace(settings, max_waiting=config.max_waiting)
            scheduler = Scheduler(settings, pack_epoch(config.epoch), compiler)
            ready(clients.address, card)
            linger_ms = _LAST_ANSWERS_MS
            try:
                serve(StepLoop(scheduler, engine), clients, stop, draining)
            except Exception as error:
                failed = True
                clients.broadcast(Failed(b"", "engine_unavailable", f"the engine failed in a step: {describe(error)}"))
                raise
        finally:
            clients.close(linger_ms)
    finally:
        context.term()
        if not failed:
            engine.close()
