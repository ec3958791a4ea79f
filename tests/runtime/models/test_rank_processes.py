"""Ranks as they are deployed: a process each, meeting over TCP."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch

from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.ranks import all_logits, load, process_rank_main, tcp_rendezvous


def test_two_processes_compute_the_logits_of_one(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "qwen3")
    single = load(checkpoint)
    sequences = [list(range(40))]
    expected = all_logits(single, sequences)
    outs = [tmp_path / f"rank-{rank}.pt" for rank in range(2)]
    common = (2, tcp_rendezvous(), "cpu", torch.float32, checkpoint, [sequences])
    other = multiprocessing.get_context("spawn").Process(target=process_rank_main, args=(1, *common, outs[1]))
    other.start()
    process_rank_main(0, *common, outs[0])
    other.join(60)
    assert other.exitcode == 0
    for out in outs:
        result = torch.load(out)
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-4)
        assert result["bytes"] <= 0.6 * single.parameter_bytes
        assert result["transport"] == "gloo, TCP over loopback"
