"""Drafts of the rows: which rows have how many verified in a step, and what became of them.

The device finds drafts, and verifies them (`kernels/speculation`). The scheduler only says how many of its decode rows
each request gets: more take longer, and bring more tokens the better the row's drafts have been.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.scheduler.logits_processors import is_penalized
from minisgl.scheduler.request import DraftRows, Request, RequestTable
from minisgl.scheduler.step_times import StepTimes, padded_rows
from minisgl.wire.messages import Counters
from minisgl.wire.plan import EMPTY, IntArray, VerifiedRows
from minisgl.wire.row_texts import RowText

_DECAY: Final = 0.7
"""Weight of what drafts of a row have been before, at each step: copying begins and ends suddenly."""
_FIRST_RATE: Final = 0.3
"""Share of accepted drafts that is expected of a new row."""
_PREDICTED_RATE: Final = 0.8
"""The same where the request predicts its answer."""
_LEAST_RATE: Final = 0.02
"""Even drafts that were never accepted may be, where they cost nothing."""
_LEAST_GAIN: Final = 1.02
"""Factor by which more rows must be faster than fewer: times of steps are not known better."""


def with_drafts(slots: IntArray, positions: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
    """Decode rows of a step, slots and positions [D], of rows [W] with these widths."""
    first = widths.cumsum(dtype=np.int32) - widths
    place = np.arange(widths.sum(), dtype=np.int32) - np.repeat(first, widths)
    return np.repeat(slots, widths), np.repeat(positions, widths) + place


class Drafts:
    """Drafts of all rows."""

    def __init__(self, config: SchedulerConfig, table: RequestTable, times: StepTimes, counters: Counters) -> None:
        """`times`: of the steps, by decode rows."""
        self.are_on = config.most_drafts > 0
        self._most = config.most_drafts
        self._most_rows = max(config.max_decode_rows, config.max_running)
        self._max_model_len = config.max_model_len
        self._table = table
        self._counters = counters
        self._times = times
        rows = config.max_running if self.are_on else 0
        self._tried: NDArray[np.float64] = np.zeros(rows)
        """Drafts that were verified, older ones with less weight."""
        self._accepted: NDArray[np.float64] = np.zeros(rows)
        self._predicted: IntArray = np.zeros((2, rows), np.int32)
        """Tokens of predicted texts that were accepted and rejected."""
        self._predicting: set[int] = set()
        """Slots whose last requests predict their answers."""

    def join(self, request: Request) -> IntArray:
        """`StepPlan.texts` of a row that joins."""
        slot = request.slot
        assert slot is not None
        # Masks and the counts of penalized tokens are those behind the last token.
        self._table.may_draft[slot] = may = not (request.is_constrained or is_penalized(request.params))
        rate = _PREDICTED_RATE if len(request.prediction) else _FIRST_RATE
        self._tried[slot], self._accepted[slot] = 1.0, rate
        self._predicted[:, slot] = 0
        self._predicting.discard(slot)
        if len(request.prediction):
            self._predicting.add(slot)
        prediction = request.prediction[: self._max_model_len]
        tokens = request.tokens
        if not may:
            prediction = tokens = EMPTY
        return RowText.of(slot, request.limit, prediction, request.prompt_length, tokens).encode()

    def predicted(self, slots: IntArray) -> dict[int, tuple[int, int]]:
        """`StepOutput.predicted` of rows with these slots: on the last row of each."""
        if not self._predicting:
            return {}
        rows = {slot: row for row, slot in enumerate(slots.tolist()) if slot in self._predicting}
        counts = self._predicted[:, list(rows)].T.tolist()
        return {row: (accepted, rejected) for row, (accepted, rejected) in zip(rows.values(), counts, strict=True)}

    def widths(self, slots: IntArray, *, waiting: bool) -> IntArray:
        """Decode rows of each of the `slots` [W] in the next step; empty: the engine does not speculate. `waiting`:
        prompts are waiting, beside which no drafts are verified."""
        if not self.are_on:
            return EMPTY
        widths = np.ones(len(slots), np.int32)
        if waiting or not len(slots):
            return widths
        table = self._table
        # The last token of a request is no input.
        left = table.limit.take(slots) - 1 - table.computed.take(slots)
        most = np.where(table.may_draft.take(slots), np.minimum(left - 1, self._most), 0)
        return widths + self._numbers(slots, most)

    def _numbers(self, slots: IntArray, most: IntArray) -> IntArray:
        """Drafts of each row that bring the most tokens a second, at most `most` [W]."""
        rates = np.maximum(self._accepted[slots] / self._tried[slots], _LEAST_RATE)
        # The chance that a row's first drafts, so many, are all accepted.
        chances = rates[:, None] ** np.arange(1, self._most + 1)
        chances[np.arange(self._most) >= most[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")
        gains = np.concatenate(((0.0,), chances.ravel()[order].cumsum()))
        numbers = np.zeros(len(slots), np.int32)
        np.add.at(numbers, order[: self._best_number(len(slots), gains)] // self._most, 1)
        return numbers

    def _best_number(self, rows: int, gains: NDArray[np.float64]) -> int:
        """Number of drafts of all `rows` together; the first n of them bring `gains[n]` tokens."""
        sizes, seconds = self._times.decode_curve()
        if padded_rows(rows) not in sizes:
            # Without drafts, to learn what these cost.
            return 0
        # Steps of these numbers of drafts are just not padded.
        most = min(int(np.count_nonzero(np.diff(gains))), self._most_rows - rows)
        choices = np.array(
            [number for number in range(most + 1) if padded_rows(rows + number) == rows + number or number in (0, most)]
        )
        # More rows than were measured are expected to take as long as the most of these, so that they are measured.
        times = np.interp([padded_rows(rows + number) for number in choices], sizes, seconds)
        rates = (rows + gains[choices]) / times
        rates[0] *= _LEAST_GAIN
        return int(choices[rates.argmax()])

    def observe(self, rows: DraftRows, verified: VerifiedRows | None) -> IntArray:
        """Learn from a step. Returns the numbers [R] of tokens that count."""
        if verified is None:
            return np.ones_like(rows.widths)
        counts, slots = verified.counts, rows.slots
        tried = np.minimum(verified.offered, rows.widths - 1)
        accepted = np.minimum(counts - 1, tried)
        # A rejected draft ends the trial; without any verified one, the first was compared.
        trials = np.maximum(accepted + (accepted < tried), 1)
        successes = np.where(tried > 0, accepted, verified.hits)
        self._tried[slots] = self._tried[slots] * _DECAY + trials
        self._accepted[slots] = self._accepted[slots] * _DECAY + successes
        if tried.any():
            self._count(slots, tried, accepted, verified.predicted)
        return counts

    def _count(self, slots: IntArray, tried: IntArray, accepted: IntArray, predicted: IntArray) -> None:
        """Count verified and accepted drafts [R]."""
        from_prediction = predicted * accepted, predicted * tried
        self._predicted[0, slots] += from_prediction[0]
        self._predicted[1, slots] += from_prediction[1] - from_prediction[0]
        counters = self._counters
        counters.drafts += int(np.count_nonzero(tried))
        counters.draft_tokens += int(tried.sum())
        counters.accepted_draft_tokens += int(accepted.sum())
        counters.accepted_predicted_tokens += int(from_prediction[0].sum())
        counters.predicted_tokens += int(from_prediction[1].sum())
        for place, rows in enumerate(np.bincount(accepted, minlength=1)[:0:-1].cumsum()[::-1].tolist()):
            counters.accepted_by_place[place] += rows
