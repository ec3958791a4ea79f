"""Two ranks, with a process and a GPU each, compared with float32 on a CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.numerics.cases import TWO_RANK_CASES, Case
from support.numerics.compare import ROUNDED, check_features, check_rounded_numbers, distance
from support.numerics.rank_pairs import SecondRank
from support.numerics.ranks import all_logits, load, process_rank_main, tcp_rendezvous
from support.numerics.workload import workload

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    # A rank whose peer has died waits for it inside of NCCL, where no signal is handled.
    pytest.mark.timeout(300, method="thread"),
]


@pytest.mark.parametrize("case", TWO_RANK_CASES, ids=str)
def test_logits_and_tokens_match_a_cpu(
    case: Case, second_rank: SecondRank, wide_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = wide_checkpoint(case.arch)
    work = workload(case)
    outcome, pair = second_rank.serve(case, work, checkpoint, tmp_path, "cuda", "bfloat16")
    check_rounded_numbers(work, outcome, load(checkpoint))
    check_features(case, work, outcome, pair.rank0.stats)
    assert pair.rank0.stats.graph_replays
    first, second = pair.followed
    assert first.results == second.results, "the ranks had other rows or other tokens"


@pytest.mark.parametrize(
    ("meeting", "model", "dtype"),
    [
        ("tcp", "qwen3-moe", torch.float32),
        ("file", "qwen3-moe", torch.float32),
        ("tcp", "qwen3-moe", torch.bfloat16),
        ("file", "qwen3-moe", torch.bfloat16),
        ("file", "qwen3", torch.bfloat16),
        ("file", "layers of 14B", torch.bfloat16),
    ],
)
def test_logits_match_a_cpu(
    meeting: str,
    model: str,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
    wide_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Logits of single tokens, one and many at a time."""
    checkpoint = request.getfixturevalue("layers_of_14b") if model == "layers of 14B" else wide_checkpoint(model)
    sequences = [[token] for token in range(120)]
    expected = all_logits(load(checkpoint), sequences)
    batches = [*([sequence] for sequence in sequences[:32]), sequences[32:40], sequences[40:]]
    outs = [tmp_path / f"rank-{rank}.pt" for rank in range(2)]
    rendezvous = f"file://{tmp_path}/meeting" if meeting == "file" else tcp_rendezvous()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=process_rank_main,
            args=(rank, 2, rendezvous, f"cuda:{rank}", dtype, checkpoint, batches, outs[rank]),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0, 0]
    for out in outs:
        result = torch.load(out)
        assert distance(result["logits"], expected) <= (ROUNDED if dtype is torch.bfloat16 else 1e-4)
        assert result["transport"].startswith("NCCL, P2P")
