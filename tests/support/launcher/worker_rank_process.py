"""Rank 1 of an engine on a CPU, in its own process."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from minisgl.config import EngineConfig


def start_worker_rank(config: EngineConfig, address: str) -> tuple[BaseProcess, str]:
    """Start the process; returns it and the address on which it receives plans."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(config, address, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours.recv()


def _main(config: EngineConfig, address: str, pipe: Connection) -> None:
    import torch

    from minisgl.engine.engine import create_engine
    from minisgl.engine.worker_rank import run

    torch.set_num_threads(1)
    run(address, lambda: create_engine(config), ready=pipe.send, stop=threading.Event())
