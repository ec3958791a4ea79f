"""Results of the scheduler: tokens for clients, failures and counters."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.errors import CodedError
from minisgl.wire.messages import (
    REQUEST_ID_BYTES,
    PromptLogprobs,
    TokenLogprobs,
)
from minisgl.wire.plan import FloatArray, IntArray

DEADLINE_EXCEEDED_MESSAGE: Final = "the deadline of the request passed before its answer was complete"


class RequestError(CodedError):
    """A request is refused; its client receives the stable code."""


class Failure(msgspec.Struct, frozen=True):
    """An accepted request that ends without a complete answer."""

    client: int
    id: bytes
    code: str
    message: str


class StepOutput(msgspec.Struct, frozen=True):
    """Tokens for the clients of one step: columns of equal length, one row per token; `ids` has dtype V16."""

    ids: NDArray[np.void]
    client: IntArray
    index: IntArray
    tokens: IntArray
    finish: NDArray[np.uint8]
    cached: IntArray
    failures: list[Failure]
    logprobs: dict[int, TokenLogprobs] = {}
    """Log-probabilities by row, where the request wants them."""
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    """Client and message; clients receive these before the rows."""
    started: dict[int, tuple[float, float]] = {}
    """First tokens by row: seconds in the queue, and the time of admission on the scheduler's clock."""
    preemptions: dict[int, int] = {}
    """First tokens behind a preemption by row: number of preemptions of the request so far."""
    accepted: list[tuple[int, bytes]] = []
    """Client and id of requests that are queued since their grammars are compiled."""
    pooled: FloatArray | None = None
    """[rows, size] outputs of a model that does not generate."""
    predicted: dict[int, tuple[int, int]] = {}
    """Accepted and rejected tokens of the request's prediction so far, by row; at the latest in the row that ends it.
    """

    @staticmethod
    def without_tokens(failures: list[Failure], accepted: list[tuple[int, bytes]]) -> StepOutput:
        """Messages for clients while no step is completed."""
        none = np.empty(0, np.int32)
        ids = np.empty(0, f"V{REQUEST_ID_BYTES}")
        return StepOutput(ids, none, none, none, np.empty(0, np.uint8), none, failures, accepted=accepted)
