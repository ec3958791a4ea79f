"""Audit of tensor parallelism: all ranks must sample the same tokens in every step."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import EngineError


def gather_hashes(parallel: TensorParallel, tokens: torch.Tensor) -> torch.Tensor:
    """Hash of each rank's `tokens` [S], as int64 [ranks] on the device."""
    # Also for S = 0: a step may end in the middle of its only prompt.
    weights = 2 * torch.arange(len(tokens), dtype=torch.int64, device=tokens.device) + 1
    # Odd multiples of an odd constant, modulo 2^64: any single difference and any swap of two tokens changes the sum.
    return parallel.all_gather(((tokens.long() + 2) * weights * -0x61C8864680B583EB).sum())


def check_hashes(step: int, hashes: list[int]) -> None:
    """Raises EngineError when the hashes of the ranks differ."""
    if len(set(hashes)) > 1:
        listed = ", ".join(f"{rank}: {value & 0xFFFFFFFFFFFFFFFF:016x}" for rank, value in enumerate(hashes))
        raise EngineError(
            "ranks_diverged",
            f"the ranks sampled different tokens in step {step} (hashes by rank: {listed}); this is a bug of the "
            "engine: report it with the model and the command line",
        )
