"""`python -m support.launcher.hanging_ranks COMMAND …` is `minisgl COMMAND …` with ranks that hang on request.

A file `OPERATION-RANK` in the directory that the variable HANGS names makes the next step of that rank hang, once:

- `launch`, `collect`: the call never returns.
- `lock`: it never returns, and keeps Python's interpreter lock.
- `fail`: `collect` runs out of memory.
- `kernel`: a kernel on the device never ends.
- `desert`: the rank ignores this plan and all later ones, so the others wait in a collective.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.config import EngineConfig
from minisgl.engine.interface import Engine
from minisgl.launcher import roles, serve
from minisgl.launcher.child import Control
from minisgl.launcher.process import ProcessSpec
from minisgl.replica import epoch
from minisgl.wire.plan import StepPlan, StepResult
from support.wrapped_engine import WrappedEngine

DIRECTORY: Final = "HANGS"


class HangingEngine(WrappedEngine[Engine]):
    def __init__(self, engine: Engine, rank: int) -> None:
        super().__init__(engine)
        self._rank = rank
        self._deserted = False

    def launch(self, plan: StepPlan) -> Any:
        if self._is_due("launch"):
            threading.Event().wait()
        if self._is_due("lock"):
            _wait_with_lock()
        if self._is_due("kernel"):
            _launch_endless_kernel(self._engine)
        self._deserted |= self._is_due("desert")
        return plan.step if self._deserted else self._engine.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        if self._is_due("collect"):
            threading.Event().wait()
        if self._is_due("fail"):
            raise MemoryError
        return StepResult(handle, np.empty(0, np.int32)) if self._deserted else self._engine.collect(handle)

    def _is_due(self, operation: str) -> bool:
        try:
            Path(os.environ[DIRECTORY], f"{operation}-{self._rank}").unlink()
        except FileNotFoundError:
            return False
        return True


def _wait_with_lock() -> None:
    """Wait for ever in a call that keeps the interpreter lock, and that no signal interrupts."""
    libc = ctypes.PyDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)


def _launch_endless_kernel(engine: Any) -> None:
    import torch

    from support.launcher.endless_kernel import launch

    with torch.cuda.stream(engine._stream):
        launch()


def rank0(raw: msgspec.Raw, control: Control) -> None:
    _run(roles.rank0, raw, control)


def worker_rank(raw: msgspec.Raw, control: Control) -> None:
    _run(roles.worker_rank, raw, control)


def _run(target: Callable[[msgspec.Raw, Control], None], raw: msgspec.Raw, control: Control) -> None:
    from minisgl.engine import engine

    create_engine = engine.create_engine

    def create(config: EngineConfig, *args: Any) -> Engine:
        return HangingEngine(create_engine(config, *args), config.rank)

    vars(engine)["create_engine"] = create
    target(raw, control)


def _hanging(rank_specs: Callable[..., list[ProcessSpec]]) -> Callable[..., Sequence[ProcessSpec]]:
    """Wrap `rank_specs.rank_specs`."""

    def specs(*args: Any, **keywords: Any) -> list[ProcessSpec]:
        return [
            msgspec.structs.replace(spec, target=f"{__spec__.name}:{spec.target.rpartition(':')[2]}")
            for spec in rank_specs(*args, **keywords)
        ]

    return specs


def main() -> int:
    from minisgl.cli.main import main as run_command

    for module in (serve, epoch):
        vars(module)["rank_specs"] = _hanging(vars(module)["rank_specs"])
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
