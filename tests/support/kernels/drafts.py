"""Random texts, drafts and sampled tokens of rows, for tests of speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from minisgl.kernels.speculation.place_drafts import place_drafts
from minisgl.kernels.speculation.row_text_tables import NO_TOKEN, RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows, SampledRows
from minisgl.kernels.speculation.verify_drafts import verify_drafts
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.row_texts import MATCHED_TOKENS


@dataclass(frozen=True)
class Case:
    """Rows whose sequences have at most `longest` tokens, as have the texts before them."""

    rows: int
    longest: int
    vocabulary: int = 3
    period: int = 0
    """Number of tokens after which a text repeats, but for some; 0: it is random."""


CASES: Final = {
    "one row": Case(1, 40),
    "texts of one token": Case(20, 1),
    "short texts": Case(60, 30, vocabulary=2),
    "one token again and again": Case(20, 60, vocabulary=1),
    "short texts that repeat": Case(80, 300, vocabulary=50, period=21),
    "several blocks": Case(6, 12_000, vocabulary=40),
    "several blocks that repeat": Case(8, 12_000, vocabulary=5000, period=900),
    "several blocks that hardly repeat": Case(6, 12_000, vocabulary=20_000),
}


class Step:
    """One step of a case on `device`, equal for equal cases: decode rows with drafts, two that pad the batch, and rows
    that sample after other tokens."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.dummy = case.rows
        capacity = 2 * case.longest + MOST_DRAFTS + 1
        host = RowTextTables.empty(case.rows + 1, capacity, torch.device("cpu"))
        slots = draw.permutation(case.rows)
        widths = draw.integers(1, MOST_DRAFTS + 2, case.rows)
        first = np.cumsum(widths) - widths
        sampled, places = np.zeros((2, widths.sum()), np.int64)
        for row, slot in enumerate(slots):
            position = int(draw.integers(1, case.longest + 1))
            origin = int(draw.integers(0, case.longest + 1)) if row % 2 else 0
            end = origin + position
            text = draw.integers(0, case.vocabulary, capacity)
            if case.period:
                text = np.where(draw.random(capacity) < 0.03, text, np.resize(text[: case.period], capacity))
                # By one of the tokens that are compared an older repetition may be better than the newest.
                text[end - case.period - MATCHED_TOKENS + draw.integers(1, MOST_DRAFTS + 2)] = 0
            own = slice(first[row], first[row] + widths[row])
            sampled[own] = text[end : end + widths[row]]
            drafts = text[end : end + draw.integers(0, MOST_DRAFTS + 1)].copy()
            wrong = draw.integers(0, len(drafts) + 1)
            drafts[wrong:] = draw.integers(0, case.vocabulary, len(drafts) - wrong)
            text[end : end + MOST_DRAFTS] = NO_TOKEN
            text[end : end + len(drafts)] = drafts
            host.texts[slot] = torch.from_numpy(text)
            host.next_position[slot], host.origin[slot] = position - 1, origin
            host.limit[slot] = position + int(draw.integers(-1, 12))
            # Often where the drafts go on as they have.
            period = case.period or 1
            sources = 0, end - period, max(end - 2 * period, 0), int(draw.integers(0, end))
            host.source[slot] = int(draw.choice(sources))
            if row % 9 == 8:
                sampled[first[row] + draw.integers(0, widths[row])] = NO_TOKEN
            places[own] = position + np.arange(widths[row])
        decode = np.append(slots.repeat(widths), [self.dummy] * 2)
        before = np.append(np.arange(len(sampled)) - first.repeat(widths), [0, 0])
        after = np.append(np.arange(len(decode)), len(decode) + 5 * np.arange(3))
        unknown = np.full_like(decode, -7), np.full_like(after, -7)
        parts = [slots, first, widths, sampled, places, decode, before, *unknown, after]
        # Parts of one upload, which begin at odd addresses.
        starts = 1 + np.cumsum([0, *(len(part) + len(part) % 2 + 2 for part in parts)])
        upload = np.full(starts[-1], -9, np.int32)
        for start, part in zip(starts, parts, strict=False):
            upload[start : start + len(part)] = part
        self.upload = torch.from_numpy(upload).to(device)
        views = [self.upload[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]
        self.tables = RowTextTables(
            *(column.to(device) for column in (host.next_position, host.limit, host.origin, host.source, host.texts))
        )
        self.rows = SampledRows(*views[:3])
        self.tokens, self.places = views[3:5]
        self.decode = DecodeRows(*views[5:])

    def verified(self, verify: Callable[..., torch.Tensor] = verify_drafts) -> list[Any]:
        """The report, and the tables thereafter."""
        report = verify(self.tables, self.rows, self.tokens, self.places)
        tables = self.tables
        columns = report, tables.next_position, tables.limit, tables.origin, tables.source, tables.texts
        return [column.tolist() for column in columns]

    def placed(self, place: Callable[..., torch.Tensor] = place_drafts) -> list[Any]:
        """The input tokens, and the whole upload thereafter."""
        tokens = place(self.tables, self.decode, self.dummy)
        return [tokens.tolist(), self.upload.tolist()]
