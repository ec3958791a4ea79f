"""Latency and bandwidth of all-reduce between ranks on this machine: rank 0 is the caller, the others are processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from minisgl.bench.report import Metric, report
from minisgl.config import Device
from minisgl.launcher.child import Control
from minisgl.launcher.devices import choose_device, rank_environment
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.worker_ranks import WorkerRanks

if TYPE_CHECKING:
    from minisgl.distributed.measure import AllReduceTiming

_TIMEOUT_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 2.0
"""Wait after an error of rank 0 for the exit of another rank, which explains it better."""


class AllReduceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one rank; only `rank` differs between them."""

    rank: int
    size: int
    rendezvous: str
    device: Device
    num_bytes: tuple[int, ...]
    """Sizes of the messages."""


def run(*, tp: int, device: Literal["auto", "cpu", "cuda"], sizes: Sequence[int], json: str | None) -> None:
    """Measure all-reduce of each size in bytes between `tp` ranks, print and write the report. Raises LauncherError
    when a rank exited, RendezvousError when the ranks did not connect to each other."""
    chosen = choose_device(device, tp)
    transport, timings = _measure_on_this_machine(chosen, tp, sizes)
    metrics: dict[str, Metric] = {"transport": transport, "device": chosen, "tensor_parallel": tp}
    for timing in timings:
        size = _format_size(timing.num_bytes)
        metrics[f"latency_us_{size}"] = timing.seconds * 1e6
        metrics[f"bus_gb_per_s_{size}"] = timing.bus_bandwidth / 1e9
    report("comm", metrics, {}, json)


def run_worker_rank(raw: msgspec.Raw, control: Control) -> None:
    """Process target of ranks 1, 2, …"""
    config = msgspec.json.decode(raw, type=AllReduceConfig)
    control.ready()
    _measure(config)


def _measure_on_this_machine(device: Device, ranks: int, sizes: Sequence[int]) -> tuple[str, list[AllReduceTiming]]:
    with run_directory() as directory:
        rank0 = AllReduceConfig(
            rank=0, size=ranks, rendezvous=f"file://{directory}/rendezvous", device=device, num_bytes=tuple(sizes)
        )
        worker_ranks = WorkerRanks(
            [
                ProcessSpec(
                    name=f"rank{rank}",
                    target="minisgl.bench.comm:run_worker_rank",
                    config=msgspec.structs.replace(rank0, rank=rank),
                    environment=rank_environment(device, ranks),
                )
                for rank in range(1, ranks)
            ]
        )
        try:
            return _measure(rank0)
        except Exception:
            worker_ranks.check(_EXIT_SECONDS)
            raise
        finally:
            worker_ranks.close()


def _measure(config: AllReduceConfig) -> tuple[str, list[AllReduceTiming]]:
    """Take part as one rank; returns the transport and a timing for each size."""
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
        return parallel.transport, measure_all_reduce(parallel, config.num_bytes)
    finally:
        parallel.close()


def _format_size(num_bytes: int) -> str:
    """Size in the largest unit that gives a whole number, such as `64KiB`."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B"
