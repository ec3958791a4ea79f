from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed import tensor_parallel
from minisgl.distributed.measure import measure_all_reduce
from minisgl.distributed.nccl_report import describe
from minisgl.distributed.tensor_parallel import RendezvousError, TensorParallel
from support.launcher.ports import free_port
from support.numerics.ranks import run_ranks


def test_one_rank_needs_no_group() -> None:
    alone = TensorParallel()
    values = torch.tensor([1.0, 2.0])
    assert alone.all_reduce_sum(values) is values
    assert alone.all_gather_last_dim(values) is values
    assert alone.all_gather(values).tolist() == [[1.0, 2.0]]
    assert alone.gather_int(5) == [5]
    gathered, indices = alone.all_gather_pairs(values, torch.tensor([3, 4]))
    assert gathered.tolist() == [[1.0, 2.0]]
    assert indices.tolist() == [[3, 4]]
    alone.barrier()
    alone.close()
    assert "one rank" in alone.transport


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_see_all_ranks_in_order(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def work(parallel: TensorParallel) -> None:
        rank = parallel.rank
        mine = torch.full((4, 2), rank + 1, dtype=dtype)
        assert parallel.all_reduce_sum(mine) is mine
        assert (mine == sum(range(1, size + 1))).all()

        columns = torch.tensor([[10 * rank, 10 * rank + 1], [100 + rank, 200 + rank]], dtype=dtype)
        side_by_side = parallel.all_gather_last_dim(columns)
        assert side_by_side[0].tolist() == [10 * r + c for r in range(size) for c in (0, 1)]
        assert side_by_side[1].tolist() == [h + r for r in range(size) for h in (100, 200)]
        out = torch.empty(size, 2, 2, dtype=dtype)
        assert parallel.all_gather(columns, out) is out
        assert torch.equal(out[rank], columns)

        values, indices = parallel.all_gather_pairs(
            torch.tensor([rank + 0.5, -float("inf")]), torch.tensor([2_000_000_000 + rank, rank])
        )
        assert values.tolist() == [[r + 0.5, -float("inf")] for r in range(size)]
        assert indices.tolist() == [[2_000_000_000 + r, r] for r in range(size)]
        assert parallel.gather_int(2**40 + rank) == [2**40 + r for r in range(size)]
        parallel.barrier()
        assert parallel.transport == "gloo, TCP over loopback"

    run_ranks(size, tmp_path, work)


def test_parts_of_ranks_are_equal(tmp_path: Path) -> None:
    parts = run_ranks(2, tmp_path, lambda parallel: parallel.shard(6))
    assert parts == [slice(0, 3), slice(3, 6)]


def test_a_process_creates_groups_in_succession_and_closes_twice(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, tmp_path, lambda parallel: (parallel.gather_int(1), parallel.close()))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_connect_at_an_address(host: str) -> None:
    """The same port twice: a rank that was started again finds it as its predecessor left it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    port = free_port()
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def meet(rank: int) -> list[int]:
        parallel = TensorParallel(rank=rank, size=2, rendezvous=url, timeout_seconds=60)
        try:
            return parallel.gather_int(rank)
        finally:
            parallel.close()

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(meet, (1, 0))) == [[0, 1], [0, 1]]


def test_a_missing_rank_is_an_error_with_the_address(tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/meet"
    with pytest.raises(RendezvousError, match="rank 0 of 2") as caught:
        TensorParallel(rank=0, size=2, rendezvous=rendezvous, timeout_seconds=0.5)
    assert rendezvous in str(caught.value)
    assert caught.value.code == "rendezvous_failed"
    with pytest.raises(RendezvousError, match="rank 1 of 2"):
        TensorParallel(rank=1, size=2, rendezvous=f"tcp://127.0.0.1:{free_port()}", timeout_seconds=0.5)


def test_a_rank_that_comes_first_opens_its_store_once_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that finds no other one tries again only much later."""
    masters: list[bool] = []
    tried = threading.Event()
    connect, open_store = socket.create_connection, tensor_parallel._c10d.TCPStore

    def connect_noted(*address: Any) -> socket.socket:
        tried.set()
        return connect(*address)

    def open_noted(*address: Any, is_master: bool, timeout: timedelta) -> Any:
        masters.append(is_master)
        return open_store(*address, is_master=is_master, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", connect_noted)
    monkeypatch.setattr(tensor_parallel._c10d, "TCPStore", open_noted)
    url = f"tcp://127.0.0.1:{free_port()}"

    def meet(rank: int) -> None:
        TensorParallel(rank=rank, size=2, rendezvous=url, timeout_seconds=60).close()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 1)
        assert tried.wait(60)
        meet(0)
        first.result()
    assert masters == [True, False]


@pytest.mark.parametrize("rendezvous", ["", "tcp://host", "http://host:1", "file://"])
def test_an_address_of_an_unknown_form_is_rejected(rendezvous: str) -> None:
    with pytest.raises(RendezvousError, match="neither"):
        TensorParallel(rank=0, size=2, rendezvous=rendezvous)


def test_all_reduce_is_measured_by_size(tmp_path: Path) -> None:
    sizes = [4, 4096, 1 << 20]
    for timings in run_ranks(2, tmp_path, lambda parallel: measure_all_reduce(parallel, sizes, torch.float32)):
        assert [timing.num_bytes for timing in timings] == sizes
        for timing in timings:
            assert timing.algorithm_bandwidth == pytest.approx(timing.num_bytes / timing.seconds)
            assert timing.bus_bandwidth == pytest.approx(timing.algorithm_bandwidth)


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("", "NCCL, transport unknown"),
        ("h:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "NCCL, SHM/direct/direct"),
        ("NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", "NCCL, P2P/CUMEM"),
        (
            "NCCL INFO GPU/0-6000 (0) + NVL[480.0] - GPU/0-7000\nChannel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "NCCL, P2P/CUMEM/read over NVLink",
        ),
        (
            "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\nChannel 01/0 : 0[0] -> 1[0] via P2P/IPC",
            "NCCL, NET/Socket/0 and P2P/IPC",
        ),
    ],
)
def test_the_transport_is_read_from_the_log_of_nccl(log: str, transport: str) -> None:
    assert describe(log) == transport
