"""A step's groups of rows with a shared prefix, laid out for the cascade kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch

from minisgl.wire.plan import IntArray
from minisgl.wire.shared_prefixes import SharedPrefix

TILE_VECTORS: Final = 128
"""Query vectors that one program multiplies with the shared keys: rows × query heads of one KV head."""
MAX_SPLITS: Final = 8
"""Parts of a prefix that are read side by side; each costs memory traffic when they are added up."""

_COUNTS: Final = 2
_ROWS_PER_LAST_TILE: Final = 16
"""Every group may leave its last tile in part empty. There is room for a group of each so many rows."""


@dataclass(frozen=True, slots=True)
class CascadeTables:
    """Views into a step's int32 buffer, of D decode rows."""

    counts: torch.Tensor
    """[2] tiles in use, and the parts into which each one's pages are divided."""
    prefix_pages: torch.Tensor
    """[D] leading pages of each row that its tile reads; 0: the row is in no tile."""
    tiles: torch.Tensor
    """[tiles, 1 + rows]: the number of shared pages, and the decode rows that share them, −1 behind the last."""


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """How groups are cut into tiles; the same for every step of an engine."""

    group: int
    """Query heads per KV head."""
    kv_heads: int
    programs: int
    """That run side by side on the device."""
    part_pages: int
    """Least pages of a part, but for prefixes that are shorter."""

    @property
    def tile_rows(self) -> int:
        return TILE_VECTORS // self.group

    def max_tiles(self, rows: int) -> int:
        """For a batch of so many rows; those of groups too small for the room they need are attended alone."""
        return -(-rows // self.tile_rows) + rows // _ROWS_PER_LAST_TILE

    def size(self, rows: int) -> int:
        """Numbers that `pack` gives for a batch of so many rows, whatever its groups."""
        return _COUNTS + rows + self.max_tiles(rows) * (1 + self.tile_rows)

    def pack(self, groups: Sequence[SharedPrefix], rows: int) -> IntArray:
        """[size] for a batch of so many rows."""
        room = self.max_tiles(rows)
        packed = np.zeros(self.size(rows), np.int32)
        counts, prefix_pages, flat = np.split(packed, (_COUNTS, _COUNTS + rows))
        tiles = flat.reshape(room, 1 + self.tile_rows)
        tiles[:, 1:] = -1
        groups = sorted(groups, key=lambda group: len(group.rows), reverse=True)
        ends = list(accumulate(-(-len(group.rows) // self.tile_rows) for group in groups))
        groups = groups[: bisect_right(ends, room)]
        used, longest = 0, 0
        if groups:
            used, longest = ends[len(groups) - 1], max(group.pages for group in groups)
            members = np.concatenate([group.rows for group in groups])
            sizes = np.array([len(group.rows) for group in groups])
            pages = np.array([group.pages for group in groups])
            # Each group begins with a tile of its own, and fills it before the next.
            filled = np.arange(len(members)) - np.repeat(sizes.cumsum() - sizes, sizes)
            tile = np.repeat([0, *ends[: len(groups) - 1]], sizes) + filled // self.tile_rows
            tiles[tile, 1 + filled % self.tile_rows] = members
            prefix_pages[members] = tiles[tile, 0] = np.repeat(pages, sizes)
        # Parts cost memory traffic when they are added up: no more than keep the device busy, and none that are over
        # as soon as they have begun.
        splits = min(self.programs // max(used * self.kv_heads, 1), longest // self.part_pages, MAX_SPLITS)
        counts[:] = used, max(splits, 1)
        return packed

    def view(self, packed: torch.Tensor, rows: int) -> CascadeTables:
        """`packed` [size] on the device, sliced."""
        tiles = self.max_tiles(rows)
        counts, prefix_pages, flat = packed.split((_COUNTS, rows, tiles * (1 + self.tile_rows)))
        return CascadeTables(counts, prefix_pages, flat.view(tiles, -1))
