"""Collectives between GPUs, inside CUDA graphs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from support.numerics.nccl_rank import rank_main
from support.numerics.ranks import tcp_rendezvous

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("meeting", ["tcp", "file"])
def test_collectives_can_be_captured_and_report_their_transport(meeting: str, size: int, tmp_path: Path) -> None:
    """Ranks that meet at a file are on one machine, and write short messages into each other's memory."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    rendezvous = f"file://{tmp_path}/meeting" if meeting == "file" else tcp_rendezvous()
    context = multiprocessing.get_context("spawn")
    outs = [tmp_path / str(rank) for rank in range(size)]
    processes = [context.Process(target=rank_main, args=(rank, size, rendezvous, outs[rank])) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(110)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size
    for out in outs:
        assert out.read_text().startswith("NCCL, ") and "unknown" not in out.read_text()
        assert ("to all ranks at once" in out.read_text()) == (meeting == "file")
