"""The decoder computes the rows that are asked for, and those as without the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.toy.tiny import write_tiny_checkpoint
from support.kernels.sequence_attention import SequenceAttention
from support.numerics.ranks import load, run_ranks

LENGTHS = [5, 9, 1]


@torch.inference_mode()
def _hidden(
    checkpoint: Path, rows: list[int] | None, parallel: TensorParallel | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    model = load(checkpoint, parallel)
    tokens = torch.arange(sum(LENGTHS), dtype=torch.int32) + 7
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS])
    wanted = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    hidden = model.forward(tokens, positions, SequenceAttention(LENGTHS, model.config.layers), wanted)
    return hidden, model.local_logits(hidden)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("layers", [1, 3])
def test_selected_rows_equal_those_of_all_rows(arch: str, layers: int, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch, layers=layers)
    everything, _ = _hidden(checkpoint, None)
    for rows in ([4, 13, 14], [0], list(range(sum(LENGTHS)))):
        some, _ = _hidden(checkpoint, rows)
        # Products of fewer rows round in another order on some processors.
        torch.testing.assert_close(some, everything[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3-moe"])
def test_zero_rows_work_on_one_rank_and_on_two(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "model", arch)
    alone = [_hidden(checkpoint, [])]
    for hidden, logits in alone + run_ranks(2, tmp_path, lambda parallel: _hidden(checkpoint, [], parallel)):
        assert len(hidden) == len(logits) == 0
        assert hidden.shape[1] > 0 and logits.shape[1] > 0
