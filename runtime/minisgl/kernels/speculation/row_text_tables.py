"""Texts of the rows by slot, on the device: what is known of each sequence, and the drafts behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.row_texts import text_capacity

NO_TOKEN: Final = -1
"""In the place of a draft: there is none."""


@dataclass(frozen=True, slots=True)
class RowTextTables:
    """Tables of `rows` slots, the last of which pads batches; all int32.

    The token at position p of a row's sequence is `texts[slot, origin + p]`. The known ones are those up to
    `next_position`; its drafts are those behind it. A draft is accepted if it equals the token that is sampled there,
    so drafts never change what is generated."""

    next_position: torch.Tensor
    """[rows] position of the input token of the row's next step: that of its last known token."""
    limit: torch.Tensor
    """[rows] maximum number of tokens of the sequence."""
    origin: torch.Tensor
    """[rows] index of the sequence's first token in `texts`; before it is the text that the request predicts."""
    source: torch.Tensor
    """[rows] index in `texts` at which the drafts were found; 0: nothing is known of any."""
    texts: torch.Tensor
    """[rows, capacity]"""

    @staticmethod
    def empty(rows: int, capacity: int, device: torch.device, limit: int = 1 << 30) -> RowTextTables:
        """Tables without texts, for sequences of at most `limit` tokens."""
        columns = torch.zeros((4, rows), dtype=torch.int32, device=device)
        columns[1] = limit
        texts = torch.full((rows, capacity), NO_TOKEN, dtype=torch.int32, device=device)
        return RowTextTables(columns[0], columns[1], columns[2], columns[3], texts)

    @staticmethod
    def num_bytes(rows: int, max_model_len: int) -> int:
        """Device memory of the tables of an engine."""
        return 4 * rows * (4 + text_capacity(max_model_len))

    def set_text(self, slot: int, header: torch.Tensor, tokens: torch.Tensor) -> None:
        """Begin the text of a row, without drafts: `header` [2] int32 are limit and origin, `tokens` its known tokens.
        Its first sampled token sets `next_position`."""
        self.limit[slot : slot + 1] = header[:1]
        self.origin[slot : slot + 1] = header[1:]
        self.source[slot : slot + 1].zero_()
        self.texts[slot, : len(tokens)] = tokens
        self.texts[slot, len(tokens) : len(tokens) + MOST_DRAFTS] = NO_TOKEN
