"""Refusal of steps after a failed one, whose effects on the tables are lost while other ranks may have applied them,
and of steps in which ranks sample different tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import EngineError


class StepGuard:
    """Remembers the first failure of a step."""

    def __init__(self) -> None:
        self._cause = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of the work of a step. Raises EngineError before the work when an earlier step has failed."""
        if self._cause:
            raise EngineError("engine_failed", f"an earlier step failed ({self._cause}); restart the engine")
        try:
            yield
        except BaseException as error:
            # Only the text: the frames of the error refer to the tensors of the step.
            self._cause = str(error) or repr(error)
            raise


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
