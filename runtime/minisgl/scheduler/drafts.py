"""Drafts of the rows: which rows have how many verified in a step, and what became of them.

The device finds drafts, and verifies them (`kernels/speculation`). The scheduler only says how many of its decode rows
each request gets: more take longer, and bring more tokens the better the row's drafts have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SchedulerConfig
from minisgl.scheduler.logits_processors import is_penalized
from minisgl.scheduler.request import Completed, DraftRows, Request, RequestTable
from minisgl.scheduler.step_times import StepTimes, padded_rows
from minisgl.wire.messages import Counters
from minisgl.wire.plan import EMPTY, IntArray, VerifiedRows, runs
from minisgl.wire.row_texts import RowText

_DECAY: Final = 0.7
"""Weight of what drafts of a row have been before, at each step: copying begins and ends suddenly."""
_FIRST_RATE: Final = 0.3
"""Share of accepted drafts that is expected of a new row."""
_PREDICTED_RATE: Final = 0.8
"""The same where the request predicts its answer."""
_LEAST_RATE: Final = 0.05
"""Share below which no drafts of a row are verified. The device compares the first draft of each row with its next
token in any case, so a row whose drafts become right is found."""
_MOST_TEXT_TOKENS: Final = 2 << 20
"""Tokens of the texts in one plan, half of the largest frame to a worker rank. Rows beyond them have no drafts."""
_LEAST_GAIN: Final = 1.02
"""Factor by which more rows must be faster than fewer: times of steps are not known better."""
_STEP_ROWS: Final = np.array((*range(1, 17), *range(24, 65, 8), 96, *range(128, 1 << 16, 128)))
"""Decode rows of steps with drafts: matrix products take about as long for all rows of a tile. Few numbers, each of
which has to be tried to know its time."""


def with_drafts(slots: IntArray, positions: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
    """Decode rows of a step, slots and positions [D], of rows [W] with these widths."""
    return np.repeat(slots, widths), np.repeat(positions, widths) + runs(widths)[1]


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
        self._are_worthwhile = False
        """Whether drafts of some row may be accepted; else steps are planned at no cost."""

    def join(self, requests: Iterable[Request]) -> IntArray:
        """`StepPlan.texts` of the rows that join in a plan."""
        texts: list[IntArray] = []
        tokens = 0
        for request in requests:
            texts.append(self._join(request, _MOST_TEXT_TOKENS - tokens))
            tokens += len(texts[-1])
        return np.concatenate(texts)

    def _join(self, request: Request, most: int) -> IntArray:
        """The part of a row: its text, if that has at most so many tokens."""
        slot = request.slot
        assert slot is not None
        # Masks and the counts of penalized tokens are those behind the last token.
        may = not (request.is_constrained or is_penalized(request.params))
        may &= len(request.tokens) + len(request.prediction) < most
        self._table.may_draft[slot] = may
        rate = _PREDICTED_RATE if len(request.prediction) else _FIRST_RATE
        self._tried[slot], self._accepted[slot] = 1.0, rate
        self._are_worthwhile |= may
        self._predicted[:, slot] = request.predicted
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
        if waiting or not (self._are_worthwhile and len(slots)):
            return widths
        table = self._table
        # The last token of a request is no input.
        left = table.limit.take(slots) - 1 - table.computed.take(slots)
        most = np.where(table.may_draft.take(slots), np.minimum(left - 1, self._most), 0)
        return widths + self._numbers(slots, most)

    def _numbers(self, slots: IntArray, most: IntArray) -> IntArray:
        """Drafts of each row that bring the most tokens a second, at most `most` [W]."""
        rates = self._accepted[slots] / self._tried[slots]
        most = np.where(rates < _LEAST_RATE, 0, most)
        if not most.max():
            return np.zeros_like(slots)
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
        most = min(int(np.count_nonzero(np.diff(gains))), self._most_rows - rows)
        numbers = _STEP_ROWS - rows
        choices = np.concatenate(((0,), numbers[(numbers > 0) & (numbers < most)], (most,)))
        # More rows than were measured are expected to take as long as the most of these, so that they are measured.
        times = np.interp([padded_rows(rows + number) for number in choices], sizes, seconds)
        rates = (rows + gains[choices]) / times
        rates[0] *= _LEAST_GAIN
        return int(choices[rates.argmax()])

    def observe(self, slots: IntArray, hits: IntArray) -> None:
        """Learn from a step without drafts of rows with these `slots` [R]; see `VerifiedRows.hits`."""
        if self._are_worthwhile or np.count_nonzero(hits):
            self._learn(slots, 1, hits)

    def observe_drafts(self, rows: DraftRows, decode: int, verified: VerifiedRows, done: Completed) -> None:
        """Learn from a step with drafts, the first `decode` rows of which had any, and count those that clients get:
        `done` has the tokens of requests that had not ended."""
        slots, counts = rows.slots[:decode], verified.counts[:decode]
        tried = np.minimum(verified.offered[:decode], rows.widths[:decode] - 1)
        accepted = np.minimum(counts - 1, tried)
        # A rejected draft ends the trial; without any verified one, the first was compared.
        trials = np.maximum(accepted + (accepted < tried), 1)
        self._learn(slots, trials, np.where(tried > 0, accepted, verified.hits[:decode]))
        sent = np.bincount(done.slots, minlength=len(self._tried))[slots].astype(np.int32)
        self._count(
            slots, tried * (sent > 0), np.minimum(accepted, np.maximum(sent - 1, 0)), verified.predicted[:decode]
        )

    def _learn(self, slots: IntArray, trials: IntArray | int, successes: IntArray) -> None:
        self._tried[slots] = self._tried[slots] * _DECAY + trials
        self._accepted[slots] = self._accepted[slots] * _DECAY + successes
        may = self._table.may_draft & (self._accepted >= _LEAST_RATE * self._tried)
        self._are_worthwhile = bool(np.count_nonzero(may))

    def _count(self, slots: IntArray, tried: IntArray, accepted: IntArray, predicted: IntArray) -> None:
        """Count verified and accepted drafts [R]."""
        from_prediction = predicted * accepted, predicted * tried
        self._predicted[0, slots] += from_prediction[0]
        self._predicted[1, slots] += from_prediction[1] - from_prediction[0]
        for slot in self._predicting.intersection(slots.tolist()):
            if (request := self._table.requests[slot]) is not None:
                accepted_, rejected = self._predicted[:, slot].tolist()
                request.predicted = accepted_, rejected
        counters = self._counters
        counters.drafts += int(np.count_nonzero(tried))
        counters.draft_tokens += int(tried.sum())
        counters.accepted_draft_tokens += int(accepted.sum())
        counters.accepted_predicted_tokens += int(from_prediction[0].sum())
        counters.predicted_tokens += int(from_prediction[1].sum())
        for place, rows in enumerate(np.bincount(accepted, minlength=1)[:0:-1].cumsum()[::-1].tolist()):
            counters.accepted_by_place[place] += rows
