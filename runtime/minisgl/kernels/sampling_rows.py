"""Sampling parameters of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

WEIGHT_UNIT: Final = float(1 << 30)
"""Integer weight of the most likely token of a row, in the sums of top-p."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of S rows, which kernels read from the engine's table of R slots. Properties are [S]."""

    table: torch.Tensor
    """[6, R] int32: temperature (float bits), top_k, top_p, min_p (float bits), seed low, seed high."""
    slots: torch.Tensor
    """[S] int32"""
    positions: torch.Tensor
    """[S] int32: number of tokens before the one that is sampled."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32; 0: greedy."""
        return self._column(0).view(torch.float32)

    @property
    def top_k(self) -> torch.Tensor:
        """int32; ≤ 0: all."""
        return self._column(1)

    @property
    def top_p(self) -> torch.Tensor:
        return self._column(2).view(torch.float32)

    @property
    def min_p(self) -> torch.Tensor:
        return self._column(3).view(torch.float32)

    @property
    def seed_low(self) -> torch.Tensor:
        return self._column(4)

    @property
    def seed_high(self) -> torch.Tensor:
        return self._column(5)

    def _column(self, number: int) -> torch.Tensor:
        return self.table[number].index_select(0, self.slots)

    def __getitem__(self, part: slice | torch.Tensor) -> SamplingRows:
        return SamplingRows(self.table, self.slots[part], self.positions[part])
