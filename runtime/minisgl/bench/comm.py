"""A measurement of all-reduce between ranks on this machine: rank 0 is the caller, the others are processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from minisgl.config import Device
from minisgl.launcher.child import Control
from minisgl.launcher.devices import rank_environment
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.worker_ranks import WorkerRanks

_TIMEOUT_SECONDS: Final = 60.0
_DEATH_SECONDS: Final = 2.0
"""After an error of rank 0, how long the death of another rank may take to be known: it is the better explanation."""


class AllReduceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every rank but for `rank`."""

    rank: int
    size: int
    rendezvous: str
    device: Device
    num_bytes: tuple[int, ...]
    """Sizes of the messages."""


class AllReduceTimings(msgspec.Struct, frozen=True):
    transport: str
    timings: Sequence[Any]
    """`distributed.measure.AllReduceTiming`, one for each size."""


def measure_on_this_machine(device: Device, ranks: int, num_bytes: Sequence[int]) -> AllReduceTimings:
    """Raises LauncherError when a rank died, RendezvousError when they did not meet."""
    with run_directory() as directory:
        rank0 = AllReduceConfig(
            rank=0,
            size=ranks,
            rendezvous=f"file://{directory}/rendezvous",
            device=device,
            num_bytes=tuple(num_bytes),
        )
        others = WorkerRanks(
            [
                ProcessSpec(
                    name=f"rank{rank}",
                    target="minisgl.bench.comm:other_rank",
                    config=msgspec.structs.replace(rank0, rank=rank),
                    environment=rank_environment(device, ranks),
                )
                for rank in range(1, ranks)
            ]
        )
        try:
            return _measure(rank0)
        except Exception:
            others.check(_DEATH_SECONDS)
            raise
        finally:
            others.close()


def other_rank(raw: msgspec.Raw, control: Control) -> None:
    """Process target of ranks 1, 2, …"""
    config = msgspec.json.decode(raw, type=AllReduceConfig)
    control.ready()
    _measure(config)


def _measure(config: AllReduceConfig) -> AllReduceTimings:
    """One rank's part."""
    import torch

    from minisgl.distributed.measure import measure_all_reduce
    from minisgl.distributed.tensor_parallel import TensorParallel

    if config.device == "cuda":
        torch.cuda.set_device(config.rank)
    device = torch.device("cuda", config.rank) if config.device == "cuda" else torch.device("cpu")
    parallel = TensorParallel(
        rank=config.rank,
        size=config.size,
        rendezvous=config.rendezvous,
        device=device,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    try:
        return AllReduceTimings(parallel.transport, measure_all_reduce(parallel, config.num_bytes))
    finally:
        parallel.close()
