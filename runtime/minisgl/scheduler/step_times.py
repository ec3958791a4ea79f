"""Times of steps: what the last ones took, and what the next one will take. Steps with prompts are padded to a few
sizes, and those of one size take the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.wire.plan import StepPlan

TILE: Final = 128
"""Tokens that matrix products compute at a time: further tokens cost nothing until they fill a tile."""

StepGraphs = Sequence[tuple[int, int]]
"""See `EngineLimits.step_graphs`."""


def padded_tokens(rows: int, prompt_tokens: int, graphs: StepGraphs) -> int:
    """Tokens that the engine computes for a step of this size, decode rows and padding included."""
    fitting = (sum(graph) for graph in graphs if rows <= graph[0] and prompt_tokens <= graph[1])
    return _whole_tiles(next(fitting, rows + prompt_tokens))


def full_prompt_tokens(rows: int, tokens: int, graphs: StepGraphs) -> int:
    """The most prompt tokens beside `rows` decode rows that the engine pads to at most `tokens` in all; 0 without any.
    They fill a graph, or the last tile of a step without one."""
    largest = max((graph[1] for graph in graphs if rows <= graph[0]), default=0)
    without_graph = tokens // TILE * TILE - rows
    if without_graph > largest:
        return without_graph
    fitting = (graph[1] for graph in graphs if rows <= graph[0] and padded_tokens(rows, graph[1], graphs) <= tokens)
    return max(fitting, default=0)


def _whole_tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def padded_rows(rows: int) -> int:
    """Decode rows with the padding of graphs."""
    return rows if rows <= 16 else -(-rows // 8) * 8


WINDOW: Final = 64
"""Steps with prompts that count; older ones may have run with other prompts, other kernels or another clock rate."""
_REFIT_SHARE: Final = 8
"""A new fit, which takes a quarter of a millisecond, needs one new step in this many of the window."""
_REWEIGHTINGS: Final = 3
_SMALL_ERROR: Final = 0.25
"""Relative error below which a step has full weight: times are not quite linear."""
_FIRST_RIDGE: Final = np.array((1e-2, 1e-4, 1e-4, 1e-4))
"""The first steps differ too little to tell costs apart: fixed costs take the least part."""
_RIDGE: Final = np.full(4, 1e-2)
_FORGOTTEN: Final = 512
"""Steps without prompts after which the time of other numbers of rows is not known any more."""
_RECENT: Final = 4
"""Steps without prompts whose shortest time is expected of the next one."""


class StepWork(msgspec.Struct, frozen=True):
    """Amounts of work in a step."""

    tokens: int
    """Prompt tokens and decode rows, with padding; 0 in a step without prompts, whose time needs no model."""
    pairs: float = 0.0
    """Pairs of a prompt token and a token that it attends to."""
    context: int = 0
    """Tokens that all decode rows attend to."""
    rows: int = 0
    """Decode rows of a step without prompts."""

    @classmethod
    def of(cls, plan: StepPlan, graphs: StepGraphs) -> Self:
        """The work of a plan for an engine with these graphs."""
        if not len(plan.prefill_tokens):
            return cls(0, rows=len(plan.decode_slots))
        lengths = plan.prefill_lengths.astype(np.float64)
        return cls(
            padded_tokens(len(plan.decode_slots), len(plan.prefill_tokens), graphs),
            float(lengths @ (plan.prefill_starts + lengths / 2)),
            int(plan.decode_positions.sum(dtype=np.int64)),
        )


class StepCosts(msgspec.Struct, frozen=True):
    """Linear model of the seconds of a step with prompts; no cost is negative."""

    fixed: float
    token: float
    """Per prompt token and decode row, with padding: products with the weights."""
    pair: float
    """Per pair of tokens in the attention of prompts."""
    context: float
    """Per token in the attention of decode rows."""

    def seconds(self, work: StepWork) -> float:
        """Expected duration of a step."""
        return self.fixed + self.token * work.tokens + self.pair * work.pairs + self.context * work.context


class StepTimes:
    """Measured steps. Equal measurements give equal expectations."""

    def __init__(self) -> None:
        self._decode: deque[float] = deque(maxlen=_RECENT)
        self._by_rows: dict[int, deque[float]] = {}
        """The same by padded number of decode rows."""
        self._last: dict[int, int] = {}
        """Number of the last of these steps, by the same."""
        self._count = 0
        self._work: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._costs: StepCosts | None = None
        self._new = 0
        """Steps with prompts since the last fit."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """Add a completed step."""
        if not work.tokens:
            self._decode.append(seconds)
            size = padded_rows(work.rows)
            self._by_rows.setdefault(size, deque(maxlen=_RECENT)).append(seconds)
            self._count += 1
            self._last[size] = self._count
            return
        self._work.append((1.0, work.tokens, work.pairs, work.context))
        self._seconds.append(max(seconds, 1e-6))
        self._new += 1

    @property
    def decode_seconds(self) -> float:
        """Expected duration of a step without prompts, rather too short than too long; 0 before the first one."""
        return min(self._decode, default=0.0)

    def least_prompt_seconds(self, work: StepWork) -> float:
        """Duration of a step with prompts if each of its tokens takes as little as in any measured step, rather too
        short than too long; 0 before the first one."""
        rates = (seconds / measured[1] for measured, seconds in zip(self._work, self._seconds, strict=True))
        return work.tokens * min(rates, default=0.0)

    def decode_curve(self) -> tuple[list[int], list[float]]:
        """Numbers of decode rows, ascending, and the expected durations of steps of so many without prompts. Those of
        long ago do not count: contexts were others, or something else slowed the step down."""
        for size in [size for size, last in self._last.items() if last + _FORGOTTEN < self._count]:
            del self._last[size], self._by_rows[size]
        sizes = sorted(self._by_rows)
        return sizes, [min(self._by_rows[size]) for size in sizes]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest measured step with prompts."""
        return int(max((work[1] for work in self._work), default=0))

    @property
    def costs(self) -> StepCosts | None:
        """The model of steps with prompts; None before the first one."""
        if self._new * _REFIT_SHARE >= max(len(self._work), 1):
            self._costs = _fit(np.array(self._work), np.array(self._seconds), self._costs)
            self._new = 0
        return self._costs


def _fit(work: NDArray[np.float64], seconds: NDArray[np.float64], before: StepCosts | None) -> StepCosts:
    """Minimize the sum of the absolute errors, by reweighted least squares: a step that took long for another reason,
    such as a kernel that was compiled, moves the model little. Errors of long steps are relative to their time.

    Steps beside streams take about the same time, and have more decode rows where they have fewer prompt tokens: costs
    that cannot be told apart stay in the proportions of the last fit."""
    prior, ridge = np.zeros(4), _FIRST_RIDGE
    if before is not None:
        prior, ridge = np.array(msgspec.structs.astuple(before)), _RIDGE
    scale = np.maximum(seconds, np.median(seconds))
    weights = scale**-2
    coefficients = _least_squares(work, seconds, weights, prior, ridge)
    for _ in range(_REWEIGHTINGS):
        errors = np.abs(work @ coefficients - seconds) / scale
        coefficients = _least_squares(work, seconds, weights / np.maximum(errors, _SMALL_ERROR), prior, ridge)
    return StepCosts(*coefficients.tolist())


def _least_squares(
    work: NDArray[np.float64],
    seconds: NDArray[np.float64],
    weights: NDArray[np.float64],
    prior: NDArray[np.float64],
    ridge: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Weighted least squares, drawn to `prior` by `ridge` relative to the diagonal, without negative coefficients: the
    most negative one is left out until none is."""
    weighted = work * weights[:, None]
    matrix, vector = weighted.T @ work, weighted.T @ seconds
    scale = np.sqrt(matrix.diagonal())
    used = np.flatnonzero(scale)
    coefficients = np.zeros(len(vector))
    while len(used):
        scales = scale[used]
        part = matrix[np.ix_(used, used)] / np.outer(scales, scales)
        drawn = vector[used] / scales + ridge[used] * prior[used] * scales
        solution = np.linalg.solve(part + np.diag(ridge[used]), drawn)
        if solution.min() >= 0:
            coefficients[used] = solution / scales
            break
        used = np.delete(used, solution.argmin())
    return coefficients
