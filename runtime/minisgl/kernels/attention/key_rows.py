"""Places of the keys of segments in the pool, and room that attention kernels need behind a copy of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

GUARD: Final = 256
"""Rows of zeros behind the last key. Attention kernels read whole tiles, and a weight of 0 does not remove a value that
is not finite."""


class KeyRows(NamedTuple):
    """Places of the keys of P segments, the same in all layers."""

    offsets: torch.Tensor
    """[P + 1] int32: offset of each segment among all keys."""
    rows: torch.Tensor
    """[at least keys + GUARD] int32: row of the flattened pool for each key; −1 in the guard, undefined behind it."""
