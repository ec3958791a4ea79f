from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minisgl.wire.plan import PlanError
from minisgl.wire.shared_prefixes import SharedPrefix, decode_prefixes, encode_prefixes

ROWS = 12


@st.composite
def groups(draw: st.DrawFn) -> list[SharedPrefix]:
    rows = np.array(draw(st.permutations(range(ROWS))), np.int32)
    cuts = sorted(draw(st.sets(st.integers(1, ROWS), max_size=4)))
    return [SharedPrefix(draw(st.integers(1, 2**31 - 1)), rows[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]


@given(groups())
def test_groups_are_decoded_as_encoded(sent: list[SharedPrefix]) -> None:
    received = decode_prefixes(encode_prefixes(sent), ROWS)
    assert [(g.pages, g.rows.tolist()) for g in received] == [(g.pages, g.rows.tolist()) for g in sent]


@given(hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(-2, 6)))
def test_random_numbers_are_rejected_or_are_groups(encoded: np.ndarray) -> None:
    try:
        found = decode_prefixes(encoded, 5)
    except PlanError:
        return
    assert np.array_equal(encode_prefixes(found), encoded)
    named = [row for group in found for row in group.rows.tolist()]
    assert all(0 <= row < 5 for row in named) and len(set(named)) == len(named)


@pytest.mark.parametrize(
    "encoded",
    [[1], [0, 1, 2], [3, 0], [2, 3, 0, 1], [2, -1, 0], [1, 1, 5], [1, 1, -1], [1, 2, 3, 3], [1, 1, 2, 4, 2, 0, 2]],
)
def test_invalid_groups_are_rejected(encoded: list[int]) -> None:
    with pytest.raises(PlanError):
        decode_prefixes(np.array(encoded, np.int32), 5)
