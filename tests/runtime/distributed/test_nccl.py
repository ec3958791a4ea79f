"""Collectives between GPUs, inside CUDA graphs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from support.nccl_rank import rank_main
from support.ranks import tcp_rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_collectives_in_a_graph_and_the_transport(tmp_path: Path) -> None:
    context, rendezvous = multiprocessing.get_context("spawn"), tcp_rendezvous()
    outs = [tmp_path / str(rank) for rank in range(2)]
    processes = [context.Process(target=rank_main, args=(rank, 2, rendezvous, outs[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0, 0]
    assert all(out.read_text().startswith("NCCL, ") and "unknown" not in out.read_text() for out in outs)
