"""Texts of rows that join, in which an engine that speculates finds drafts: part of a plan.

A row's text is the one that its request predicts, if any, then its sequence. The predicted text begins with the last
tokens of the prompt, so that it continues the prompt as the answer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from minisgl.wire.messages import MAX_PREDICTION_TOKENS, MOST_DRAFTS
from minisgl.wire.plan import IntArray

MATCHED_TOKENS: Final = 16
"""Most tokens by which drafts are found."""
LEAST_MATCHED: Final = 2
"""Fewest of them: single tokens return everywhere."""
_HEADER: Final = 4


class RowText(msgspec.Struct, frozen=True):
    """Text of a row that joins."""

    slot: int
    limit: int
    """Maximum number of tokens of the sequence."""
    origin: int
    """Index of the sequence's first token in `tokens`."""
    tokens: IntArray

    @staticmethod
    def of(slot: int, limit: int, predicted: IntArray, prompt_length: int, sequence: IntArray) -> RowText:
        """The text of a row with this predicted text and the known tokens `sequence`."""
        if not len(predicted):
            return RowText(slot, limit, 0, sequence)
        prompt = sequence[max(prompt_length - MATCHED_TOKENS, 0) : prompt_length]
        before = np.concatenate((prompt, predicted))
        return RowText(slot, limit, len(before), np.concatenate((before, sequence)))

    def encode(self) -> IntArray:
        """Part of `StepPlan.texts`."""
        header = np.array((self.slot, self.limit, self.origin, len(self.tokens)), np.int32)
        return np.concatenate((header, self.tokens))


def text_capacity(max_model_len: int) -> int:
    """Most tokens of a row's text, with the drafts behind it."""
    return MATCHED_TOKENS + min(MAX_PREDICTION_TOKENS, max_model_len) + max_model_len + MOST_DRAFTS


def decode_texts(encoded: IntArray) -> Iterator[tuple[int, RowText]]:
    """The texts of `StepPlan.texts`, each with its index there."""
    first = 0
    while first < len(encoded):
        slot, limit, origin, length = encoded[first : first + _HEADER].tolist()
        begin = first + _HEADER
        yield first, RowText(slot, limit, origin, encoded[begin : begin + length])
        first = begin + length
