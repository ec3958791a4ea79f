"""Rows of sampling parameters for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.kernels.sampling.sampling_rows import SamplingRows
from support.plans import new_row


def sampling_rows(
    count: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> SamplingRows:
    """`count` rows; a single value stands for all of them. Default seeds and positions are 0, 1, 2, …"""

    def column(value: float | Sequence[float]) -> Sequence[float]:
        return value if isinstance(value, Sequence) else [value] * count

    ks, ps, ms = column(top_k), column(top_p), column(min_p)
    numbers = range(count)
    rows = [
        new_row(0, temperature=t, top_k=int(k), top_p=p, min_p=m, seed=seed)
        for t, k, p, m, seed in zip(column(temperature), ks, ps, ms, seeds or numbers, strict=True)
    ]
    table = torch.from_numpy(np.ascontiguousarray(np.array(rows, np.int32)[:, 1:].T))
    slots = torch.arange(count, dtype=torch.int32)
    return SamplingRows(table, slots, torch.tensor(list(positions or numbers), dtype=torch.int32))
