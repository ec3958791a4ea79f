"""Which requests of a call are handed to the scheduler when.

Where the lengths of all answers are known, the longest go first: a batch that ends with its longest answer alone leaves
the device to a single row. And no more run at once than it takes for all to end together with the longest: beyond some
number of rows a decode step takes as much longer as it has more of them, and towards the end it reads all weights for a
few.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from minisgl.wire.messages import Submit

FLAT_ROWS: Final = 128
"""Up to so many rows a decode step takes about as long as the weights take to be read, whatever their number."""
GROUP: Final = 12
"""Rows that become free before requests take them: a step with prompts costs more than one without, so they are to
come together."""
_STRIDE: Final = 4


class Pacing:
    """The order of a call's requests, by their numbers, and how many of them run at once."""

    def __init__(self, submits: Sequence[Submit], most_rows: int) -> None:
        """`most_rows`: what the scheduler runs at once."""
        self._order = list(range(len(submits)))
        self._rows = len(submits)
        if submits and all(submit.ignore_eos for submit in submits):
            self._order.sort(key=lambda number: -submits[number].max_tokens)
            self._rows = rows_at_once([submits[number].max_tokens for number in self._order], most_rows)
        self._handed = 0

    def take_due(self, ended: int) -> list[int]:
        """Requests to be handed over now that so many have ended."""
        free = self._rows - (self._handed - ended)
        if free < min(GROUP, self._rows):
            return []
        due = self._order[self._handed : self._handed + free]
        self._handed += len(due)
        return due


def rows_at_once(lengths: Sequence[int], most: int) -> int:
    """About the fewest rows, but not less than FLAT_ROWS, with which answers of these lengths, the longest first, end
    in as many steps as the longest takes; where `most` rows are too few for that, as many as there are answers."""
    if len(lengths) <= FLAT_ROWS:
        return len(lengths)
    fewest = max(FLAT_ROWS, -(-sum(lengths) // lengths[0]))
    tried = range(fewest, min(most, len(lengths)) + 1, _STRIDE)
    return next((rows for rows in tried if _end_with_the_longest(lengths, rows)), len(lengths))


def _end_with_the_longest(lengths: Sequence[int], rows: int) -> bool:
    """Whether they do if the rows that end are taken over in groups."""
    ends = list(lengths[:rows])
    heapq.heapify(ends)
    for first in range(rows, len(lengths), GROUP):
        for _ in range(GROUP):
            now = heapq.heappop(ends)
        for length in lengths[first : first + GROUP]:
            if now + length > lengths[0]:
                return False
            heapq.heappush(ends, now + length)
    return True
