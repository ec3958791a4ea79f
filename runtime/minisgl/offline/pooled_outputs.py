"""Collect the pooled outputs of a call."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minisgl.offline.outputs import OfflineError
from minisgl.scheduler.step_output import StepOutput

Outputs: TypeAlias = NDArray[np.float32]


class PooledOutputs:
    """Outputs of all requests of a call. A request's number is its index in the call; the scheduler keeps it as the
    request's client."""

    def __init__(self, count: int, size: int) -> None:
        self._values: Outputs = np.empty((count, size), np.float32)
        self._errors: dict[int, str] = {}

    def take(self, output: StepOutput) -> None:
        """Store the outputs and errors of one step."""
        if output.pooled is not None:
            self._values[output.client] = output.pooled
        self._errors.update((failure.client, failure.message) for failure in output.failures)

    def values(self) -> Outputs:
        """[requests, size], once all have ended. Raises OfflineError if one failed."""
        for number, message in self._errors.items():
            raise OfflineError("engine_error", f"text {number}: {message}")
        return self._values


def cut_embeddings(embeddings: Outputs, dimensions: int) -> Outputs:
    """The first `dimensions` numbers of each embedding [N, size], normalized. Raises OfflineError."""
    if not 1 <= dimensions <= embeddings.shape[1]:
        raise OfflineError("invalid_request", f"dimensions: expected 1..{embeddings.shape[1]}, got {dimensions}")
    cut = embeddings[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    normalized: Outputs = np.divide(cut, norms, out=np.zeros_like(cut), where=norms > 0)
    return normalized
