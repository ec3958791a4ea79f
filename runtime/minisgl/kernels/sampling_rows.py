"""Sampling parameters of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of S rows: a gather from the engine's table by slot. All [S]."""

    table: torch.Tensor
    """[6, S] int32: temperature (float bits), top_k, top_p, min_p (float bits), seed low, seed high."""
    positions: torch.Tensor
    """int32: number of tokens before the one that is sampled."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32; 0: greedy."""
        return self.table[0].view(torch.float32)

    @property
    def top_k(self) -> torch.Tensor:
        """int32; ≤ 0: all."""
        return self.table[1]

    @property
    def top_p(self) -> torch.Tensor:
        return self.table[2].view(torch.float32)

    @property
    def min_p(self) -> torch.Tensor:
        return self.table[3].view(torch.float32)

    @property
    def seed_low(self) -> torch.Tensor:
        return self.table[4]

    @property
    def seed_high(self) -> torch.Tensor:
        return self.table[5]

    def __getitem__(self, part: slice | torch.Tensor) -> SamplingRows:
        return SamplingRows(self.table[:, part], self.positions[part])
