"""Sampling parameters and logits processors of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

WEIGHT_UNIT: Final = float(1 << 30)
"""Integer weight of the most likely token of a row, in the sums of top-p."""

TEMPERATURE: Final = 0
TOP_K: Final = 1
TOP_P: Final = 2
MIN_P: Final = 3
SEED_LOW: Final = 4
SEED_HIGH: Final = 5
STAGES: Final = 6
"""Bits of the stages that the row needs after the plain sample, 0 for most rows."""
REPETITION: Final = 7
FREQUENCY: Final = 8
PRESENCE: Final = 9
MASK_UNTIL: Final = 10
"""The row samples no masked token while fewer tokens than this are before the sampled one."""
BIASES: Final = 11
"""Number of biases in the row's list."""
MASKS: Final = 12
"""Number of masked tokens behind them."""
TOPS: Final = 13
"""Number of most likely tokens that the row reports; −1: no log-probabilities."""
COLUMNS: Final = 14

FILTERED: Final = 1
"""Stage: top-k, top-p or min-p at a temperature above 0."""
PENALIZED: Final = 2
BIASED: Final = 4
MASKED: Final = 8
BITMASKED: Final = 16
REPORTED: Final = 32
"""Stage: log-probabilities."""

MASKED_LOGIT: Final = -1e30
"""Logit of a masked token. Finite, since a row with an infinite logit counts as damaged, and far from the limit of
float32, since temperatures down to 1e-5 divide it."""

IN_PROMPT: Final = 1
GENERATED: Final = 2
MOST_GENERATED: Final = 16_383
"""Token counts are `IN_PROMPT` plus `GENERATED` for each time; a token is not counted more often than this."""

MOST_TOPS: Final = 20
"""Most likely tokens that a kernel reports at most; torch reports more of them."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of S rows, which kernels read from the engine's table of R slots. Properties are [S]."""

    table: torch.Tensor
    """[≥ 6, R] int32: temperature (float bits), top_k, top_p, min_p (float bits), seed low, seed high; `resample` needs
    all COLUMNS."""
    slots: torch.Tensor
    """[S] int32"""
    positions: torch.Tensor
    """[S] int32: number of tokens before the one that is sampled."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32; 0: greedy."""
        return self.floats(TEMPERATURE)

    @property
    def top_k(self) -> torch.Tensor:
        """int32; ≤ 0: all."""
        return self.column(TOP_K)

    @property
    def top_p(self) -> torch.Tensor:
        return self.floats(TOP_P)

    @property
    def min_p(self) -> torch.Tensor:
        return self.floats(MIN_P)

    @property
    def seed_low(self) -> torch.Tensor:
        return self.column(SEED_LOW)

    @property
    def seed_high(self) -> torch.Tensor:
        return self.column(SEED_HIGH)

    def column(self, number: int) -> torch.Tensor:
        """int32"""
        return self.table[number].index_select(0, self.slots)

    def floats(self, number: int) -> torch.Tensor:
        """A column of float bits, as float32."""
        return self.column(number).view(torch.float32)

    def __getitem__(self, part: slice | torch.Tensor) -> SamplingRows:
        return SamplingRows(self.table, self.slots[part], self.positions[part])


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled tokens of S rows, which sampling again replaces."""

    tokens: torch.Tensor
    """[S] int32 plain samples; −1: the row's logits are not finite, and it has no token."""
    last_token: torch.Tensor
    """[R] int32 inputs of the next step, by slot"""
