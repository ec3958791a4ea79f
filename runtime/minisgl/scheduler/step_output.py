"""What comes out of the scheduler: news for clients, refusals and counters."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.errors import CodedError
from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES, PromptLogprobs, TokenLogprobs
from minisgl.wire.plan import IntArray

DEADLINE_MESSAGE: Final = "the request's deadline passed before its answer was complete"


class RequestError(CodedError):
    """A request that cannot be served, with the stable code that its client gets."""


class Failure(msgspec.Struct, frozen=True):
    """An accepted request that ends without its answer."""

    client: int
    id: bytes
    code: str
    message: str


class StepOutput(msgspec.Struct, frozen=True):
    """News for the clients. Columns of equal length, a row for each token; `ids` has dtype V16."""

    ids: NDArray[np.void]
    client: IntArray
    index: IntArray
    tokens: IntArray
    finish: NDArray[np.uint8]
    cached: IntArray
    failures: list[Failure]
    logprobs: dict[int, TokenLogprobs] = {}
    """By row, of those that ask for them."""
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    """With the client each is for; they come before the rows."""
    started: dict[int, tuple[float, float]] = {}
    """By row, of first tokens: how long the request was queued, and when it got its place, by the scheduler's clock."""


class Counters(msgspec.Struct):
    """Since start."""

    steps: int = 0
    mixed_steps: int = 0
    """Steps with decode rows and prefill segments."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    """Computed by prefill segments; after preemptions also tokens that were generated before."""
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    evicted_pages: int = 0
    queue_times: list[int] = msgspec.field(default_factory=lambda: [0] * (len(QUEUE_TIME_EDGES) + 1))
    """As `Status.queue_times`."""
    queue_seconds: float = 0.0
    step_sizes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS_EDGES) + 1))
    """As `Status.step_sizes`."""
    step_tokens: int = 0
