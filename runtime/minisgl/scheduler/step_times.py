"""Times of steps: what the last ones took, and what the next one will take."""

from __future__ import annotations

from collections import deque
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import StepPlan

WINDOW: Final = 64
"""Steps with prompts that count; older ones may have run with other prompts, other kernels or another clock rate."""
_REFIT_SHARE: Final = 8
"""A new fit, which takes a quarter of a millisecond, needs one new step in this many of the window."""
_REWEIGHTINGS: Final = 3
_SMALL_ERROR: Final = 0.25
"""Relative error below which a step has full weight: times are not quite linear."""
_RIDGE: Final = 1e-4
"""Relative to the diagonal: where steps differ too little to tell two costs apart, each takes a part."""
_RECENT: Final = 4
"""Steps without prompts whose shortest time is expected of the next one."""


class StepWork(msgspec.Struct, frozen=True):
    """Amounts of work in a step."""

    prompt_tokens: int
    decode_rows: int
    prompt_pairs: float
    """Pairs of a prompt token and a token that it attends to."""
    decode_context: int
    """Tokens that all decode rows attend to."""

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The work of a plan. Context is counted only in steps with prompts: others need no model."""
        if not len(plan.prefill_tokens):
            return cls(0, len(plan.decode_slots), 0.0, 0)
        lengths = plan.prefill_lengths.astype(np.float64)
        pairs = float(lengths @ (plan.prefill_starts + lengths / 2))
        context = int(plan.decode_positions.sum(dtype=np.int64))
        return cls(len(plan.prefill_tokens), len(plan.decode_slots), pairs, context)


class StepCosts(msgspec.Struct, frozen=True):
    """Linear model of the seconds of a step with prompts; no cost is negative."""

    fixed: float
    token: float
    """Per prompt token and decode row: products with the weights."""
    pair: float
    """Per pair of tokens in the attention of prompts."""
    context: float
    """Per token in the attention of decode rows."""

    def seconds(self, work: StepWork) -> float:
        """Expected duration of a step."""
        return (
            self.fixed
            + self.token * (work.prompt_tokens + work.decode_rows)
            + self.pair * work.prompt_pairs
            + self.context * work.decode_context
        )

    def tokens_within(self, seconds: float, start: int) -> int:
        """Number of prompt tokens, the first at position `start`, that add at most `seconds` to a step."""
        if seconds <= 0:
            return 0
        # token · n + pair · n · (start + n / 2) = seconds
        linear = self.token + self.pair * start
        denominator = linear + (linear * linear + 2 * self.pair * seconds) ** 0.5
        return int(2 * seconds / denominator) if denominator else _MANY_TOKENS


_MANY_TOKENS: Final = 1 << 30


class StepTimes:
    """Measured steps. Equal measurements give equal expectations."""

    def __init__(self) -> None:
        self._decode: deque[float] = deque(maxlen=_RECENT)
        self._work: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._costs: StepCosts | None = None
        self._new = 0
        """Steps with prompts since the last fit."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """Add a completed step."""
        if not work.prompt_tokens:
            self._decode.append(seconds)
            return
        tokens = work.prompt_tokens + work.decode_rows
        self._work.append((1.0, tokens, work.prompt_pairs, work.decode_context))
        self._seconds.append(max(seconds, 1e-6))
        self._new += 1

    @property
    def decode_seconds(self) -> float:
        """Expected duration of a step without prompts, rather too short than too long; 0 before the first one."""
        return min(self._decode, default=0.0)

    @property
    def most_tokens(self) -> int:
        """Prompt tokens and decode rows of the largest measured step with prompts."""
        return int(max((work[1] for work in self._work), default=0))

    @property
    def costs(self) -> StepCosts | None:
        """The model of steps with prompts; None before the first one."""
        if self._new * _REFIT_SHARE >= max(len(self._work), 1):
            self._costs = _fit(np.array(self._work), np.array(self._seconds))
            self._new = 0
        return self._costs


def _fit(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> StepCosts:
    """Minimize the sum of the absolute errors, by reweighted least squares: a step that took long for another reason,
    such as a kernel that was compiled, moves the model little. Errors of long steps are relative to their time."""
    scale = np.maximum(seconds, np.median(seconds))
    weights = scale**-2
    coefficients = _least_squares(work, seconds, weights)
    for _ in range(_REWEIGHTINGS):
        errors = np.abs(work @ coefficients - seconds) / scale
        coefficients = _least_squares(work, seconds, weights / np.maximum(errors, _SMALL_ERROR))
    return StepCosts(*coefficients.tolist())


def _least_squares(
    work: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Weighted least squares without negative coefficients: the most negative one is left out until none is."""
    weighted = work * weights[:, None]
    matrix, vector = weighted.T @ work, weighted.T @ seconds
    scale = np.sqrt(matrix.diagonal())
    used = np.flatnonzero(scale)
    coefficients = np.zeros(len(vector))
    while len(used):
        scales = scale[used]
        part = matrix[np.ix_(used, used)] / np.outer(scales, scales)
        solution = np.linalg.solve(part + _RIDGE * np.eye(len(used)), vector[used] / scales)
        if solution.min() >= 0:
            coefficients[used] = solution / scales
            break
        used = np.delete(used, solution.argmin())
    return coefficients
