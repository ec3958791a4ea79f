"""Groups of decode rows whose page tables begin with the same pages, encoded in `StepPlan.shared_prefixes`.

The groups are hints: a row attends to the same positions with and without them. An engine may use them to read the
pages of a group once instead of once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl.wire.plan import EMPTY, IntArray, PlanError

_HEADER: Final = 2


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows whose first `pages` ≥ 1 pages are the same, full, and written before this step."""

    pages: int
    rows: IntArray
    """[≥ 1] indices into the decode rows of the plan; no row is in two groups."""


def encode_prefixes(groups: Sequence[SharedPrefix]) -> IntArray:
    """[X]: for each group its number of pages, its number of rows, and the rows."""
    if not groups:
        return EMPTY
    parts = [part for group in groups for part in ((group.pages, len(group.rows)), group.rows)]
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def decode_prefixes(encoded: IntArray, decode_rows: int) -> list[SharedPrefix]:
    """Groups of a plan with `decode_rows` decode rows. Raises PlanError when the encoding is invalid."""
    groups = []
    while len(encoded):
        pages, count = encoded[:_HEADER].tolist() if len(encoded) >= _HEADER else (0, 0)
        rows = encoded[_HEADER : _HEADER + count]
        if pages < 1 or count < 1 or len(rows) < count:
            raise PlanError("the sizes of a plan's shared prefixes do not add up to their length")
        groups.append(SharedPrefix(pages, rows))
        encoded = encoded[_HEADER + count :]
    if groups:
        named = np.concatenate([group.rows for group in groups])
        if named.min() < 0 or named.max() >= decode_rows or np.bincount(named).max() > 1:
            raise PlanError("a plan's shared prefixes contain a row that it does not decode, or a row in two groups")
    return groups
