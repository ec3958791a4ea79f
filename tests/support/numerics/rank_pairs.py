"""The second rank of a pair: a process that runs one engine after the other, so that torch is imported once.

Its standard input has a line with a `WorkerRankConfig` for each engine; it writes a `Followed` to its standard output
when that engine has ended.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from minisgl.config import Device, DType, EngineConfig
from minisgl.engine import worker_rank as follower
from minisgl.engine.broadcast import PlanBroadcast, TensorParallelEngine
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.launcher.rank_specs import file_rendezvous
from minisgl.launcher.ranks import WorkerRankConfig
from minisgl.wire.plan import StepPlan, StepResult
from support.engines import create_engine
from support.numerics.cases import Case
from support.numerics.run import FreePages, Outcome, full_of_nan, pool_config, serve
from support.numerics.workload import Workload, engine_config
from support.wrapped_engine import WrappedEngine


class Followed(msgspec.Struct, frozen=True):
    """Report of a rank about an engine that has ended."""

    parameter_bytes: int
    results: str
    """Hash of the plans' sampled rows and their tokens, in the order of steps."""
    audited_pages: int
    """Number of checks of free pages; 0 on rank 0, where the outcome of the case has it."""
    dirty_steps: list[int]
    """Number of checks in which a free page was not full of NaN."""


class Witness(WrappedEngine[CpuEngine | CudaEngine]):
    """Engine that hashes its plans and results."""

    def __init__(self, engine: CpuEngine | CudaEngine) -> None:
        super().__init__(engine)
        self._hash = hashlib.sha256()
        self._rows: dict[int, bytes] = {}
        self._unowned = np.ones(engine.limits.num_pages, np.bool_)
        """Free pages according to the plans: from the plan that poisons a page to the one that gives it to a row."""
        self._unowned_windows = np.ones(engine.limits.num_window_pages, np.bool_)
        self._to_audit: dict[int, FreePages] = {}
        self._audited_pages = 0
        self._are_nan: list[tuple[int, torch.Tensor]] = []

    def launch(self, plan: StepPlan) -> Any:
        self._rows[plan.step] = plan.sampled_slots.tobytes()
        self._unowned[plan.poison_pages] = True
        self._unowned[plan.page_updates[2]] = False
        self._unowned_windows[plan.poison_window_pages] = True
        self._unowned_windows[plan.window_updates[2]] = False
        unowned = self._unowned, self._unowned_windows
        self._to_audit[plan.step] = FreePages(*(np.flatnonzero(part).astype(np.int32) for part in unowned))
        return self._engine.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        result = self._engine.collect(handle)
        self._to_audit.pop(result.step, None)
        self._hash.update(self._rows.pop(result.step) + result.tokens.tobytes())
        return result

    def audit(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Logits hook, called when the step has run."""
        pages = self._to_audit.pop(plan.step)
        self._are_nan.append((plan.step, full_of_nan(self._engine.runner.kv, pages)))
        self._audited_pages += pages.total

    def followed(self) -> Followed:
        dirty = [step for step, is_nan in self._are_nan if not is_nan]
        return Followed(self.stats.parameter_bytes, self._hash.hexdigest(), self._audited_pages, dirty)


@dataclass
class Pair:
    """Rank 0 of two, in this process. `followed` has an entry for each rank once the engines have ended."""

    engine: TensorParallelEngine
    rank0: CpuEngine | CudaEngine
    followed: list[Followed]


class SecondRank:
    """The process of rank 1; a new one after a failure, since the old one may hang in a collective."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    @contextmanager
    def pair(self, config: EngineConfig, folder: Path) -> Iterator[Pair]:
        """Start both ranks, and stop them after the block. `folder` is a new directory for their rendezvous."""
        config = msgspec.structs.replace(config, tensor_parallel=2, rendezvous=file_rendezvous(folder))
        second = WorkerRankConfig(engine=msgspec.structs.replace(config, rank=1), plans=f"ipc://{folder}/plans1")
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        context: zmq.Context[Any] = zmq.Context()
        with ExitStack() as resources:
            resources.callback(context.term)
            try:
                process.stdin.write(msgspec.json.encode(second).decode() + "\n")
                process.stdin.flush()
                rank0 = create_engine(config)
                witness = Witness(rank0)
                pair = Pair(TensorParallelEngine(witness, PlanBroadcast(context, [second.plans])), rank0, [])
                resources.callback(pair.engine.close)
                yield pair
            except BaseException:
                self._process = None
                process.kill()
                process.wait()
                raise
        line = process.stdout.readline()
        assert line, f"rank 1 ended with exit code {process.wait()}"
        followed = msgspec.json.decode(line, type=Followed)
        assert followed.audited_pages > 0
        assert not followed.dirty_steps, f"steps {followed.dirty_steps}: a free page of rank 1 is not filled with NaN"
        pair.followed = [witness.followed(), followed]

    def serve(
        self, case: Case, work: Workload, checkpoint: Path, folder: Path, device: Device = "cpu", dtype: DType = "auto"
    ) -> tuple[Outcome, Pair]:
        """Run the workload of a case in an engine of two ranks. `folder` is a new directory."""
        config = pool_config(case, work, checkpoint)
        with self.pair(engine_config(checkpoint, config, device, dtype), folder) as pair:
            outcome = serve(work, config, pair.engine, pair.rank0)
        return outcome, pair

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "support.numerics.rank_pairs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        config = msgspec.json.decode(line, type=WorkerRankConfig)
        witnesses: list[Witness] = []

        def create(engine: EngineConfig = config.engine, witnesses: list[Witness] = witnesses) -> Witness:
            rank = create_engine(engine)
            witnesses.append(Witness(rank))
            # Gathering the logits that rank 0 shows takes both ranks.
            rank.runner.logits_hook = witnesses[0].audit
            return witnesses[0]

        follower.run(config.plans, create, ready=lambda address: None, stop=threading.Event())
        print(msgspec.json.encode(witnesses[0].followed()).decode(), flush=True)


if __name__ == "__main__":
    main()
