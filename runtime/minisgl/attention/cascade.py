"""Layout of a step's groups of rows with a shared prefix, for the cascade kernels."""

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
"""Most parts of a prefix that are read in parallel. Adding up their results costs memory traffic."""

_COUNTS: Final = 2
_ROWS_PER_LAST_TILE: Final = 16
"""Tables hold one extra tile per this many rows, because every group may leave its last tile partly empty."""


@dataclass(frozen=True, slots=True)
class CascadeTables:
    """Views into the int32 buffer of a step with D decode rows."""

    counts: torch.Tensor
    """[2]: tiles in use, and parts into which the pages of each tile are divided."""
    prefix_pages: torch.Tensor
    """[D]: leading pages of each row that its tile reads; 0: the row is in no tile."""
    tiles: torch.Tensor
    """[tiles, 1 + rows]: the number of shared pages, then the decode rows that share them, padded with −1."""


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """Division of groups into tiles; the same for every step of an engine."""

    group: int
    """Query heads per KV head."""
    kv_heads: int
    programs: int
    """Programs that run in parallel on the device."""
    part_pages: int
    """Least pages per part; shorter prefixes are one part."""

    @property
    def tile_rows(self) -> int:
        return TILE_VECTORS // self.group

    def max_tiles(self, rows: int) -> int:
        """Tiles in the tables of a batch of `rows` rows. Groups that do not fit are attended row by row."""
        return -(-rows // self.tile_rows) + rows // _ROWS_PER_LAST_TILE

    def size(self, rows: int) -> int:
        """Length of the array that `pack` returns for a batch of `rows` rows, independent of its groups."""
        return _COUNTS + rows + self.max_tiles(rows) * (1 + self.tile_rows)

    def pack(self, groups: Sequence[SharedPrefix], rows: int) -> IntArray:
        """Encode the groups of a batch of `rows` rows as int32 [size]."""
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
            # Each group begins a new tile and fills it before the next one.
            filled = np.arange(len(members)) - np.repeat(sizes.cumsum() - sizes, sizes)
            tile = np.repeat([0, *ends[: len(groups) - 1]], sizes) + filled // self.tile_rows
            tiles[tile, 1 + filled % self.tile_rows] = members
            prefix_pages[members] = tiles[tile, 0] = np.repeat(pages, sizes)
        # Adding up parts costs memory traffic: no more than keep the device busy, and none shorter than
        # `part_pages`.
        splits = min(self.programs // max(used * self.kv_heads, 1), longest // self.part_pages, MAX_SPLITS)
        counts[:] = used, max(splits, 1)
        return packed

    def view(self, packed: torch.Tensor, rows: int) -> CascadeTables:
        """Slice `packed` [size] on the device into tables."""
        tiles = self.max_tiles(rows)
        counts, prefix_pages, flat = packed.split((_COUNTS, rows, tiles * (1 + self.tile_rows)))
        return CascadeTables(counts, prefix_pages, flat.view(tiles, -1))
