"""Audit of tensor parallelism: every rank must have sampled the same tokens in every step."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.errors import EngineError


def gather_hashes(parallel: TensorParallel, tokens: torch.Tensor) -> torch.Tensor:
    """[ranks] int64: a hash of each rank's `tokens` [S], on the device."""
    # Without rows, too: a step may end in the middle of its only prompt.
    weights = 2 * torch.arange(len(tokens), dtype=torch.int64, device=tokens.device) + 1
    # Odd multiples of an odd constant, modulo 2^64: no single difference and no exchange of two tokens is lost.
    return parallel.all_gather(((tokens.long() + 2) * weights * -0x61C8864680B583EB).sum())


def check_hashes(step: int, hashes: list[int]) -> None:
    if len(set(hashes)) > 1:
        listed = ", ".join(f"{rank}: {value & 0xFFFFFFFFFFFFFFFF:016x}" for rank, value in enumerate(hashes))
        raise EngineError(
            "ranks_diverged",
            f"the ranks sampled different tokens in step {step} (hashes by rank: {listed}); this is an error of "
            "the engine: please report it with the model and the command line",
        )
