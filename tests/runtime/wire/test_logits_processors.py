"""Encoding of logits processors: round trip, and rejection of invalid arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minisgl.config import MAX_RUNNING
from minisgl.wire.logits_processors import RowLogitsProcessors, decode_logits_processors
from minisgl.wire.plan import PlanError

INTS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
LISTS = hnp.arrays(np.int32, st.integers(0, 4))


@st.composite
def processors(draw: st.DrawFn) -> RowLogitsProcessors:
    bias = draw(LISTS)
    named = draw(LISTS)
    return RowLogitsProcessors(
        slot=draw(st.integers(0, MAX_RUNNING)),
        prompt_length=draw(INTS),
        repetition=draw(FLOATS),
        frequency=draw(FLOATS),
        presence=draw(FLOATS),
        min_tokens=draw(INTS),
        logprobs=len(named) or draw(INTS),
        prompt_logprobs=draw(INTS),
        prompt_logprobs_from=draw(INTS),
        masked_ids=draw(LISTS),
        bias_ids=bias,
        bias_values=draw(hnp.arrays(np.float32, len(bias), elements=FLOATS)),
        prompt=draw(LISTS),
        output=draw(LISTS),
        late=draw(st.booleans()),
        logprob_ids=named,
    )


def _joined(rows: list[RowLogitsProcessors]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *(row.encode() for row in rows)], dtype=np.int32)


@given(st.lists(processors(), max_size=3))
def test_rows_are_decoded_as_encoded(rows: list[RowLogitsProcessors]) -> None:
    decoded = decode_logits_processors(_joined(rows))
    assert len(decoded) == len(rows)
    for ours, theirs in zip(decoded, rows, strict=True):
        for name in RowLogitsProcessors.__dataclass_fields__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


@given(st.lists(processors(), min_size=1, max_size=3), st.integers(1, 10))
def test_truncated_rows_are_rejected(rows: list[RowLogitsProcessors], cut: int) -> None:
    with pytest.raises(PlanError):
        decode_logits_processors(_joined(rows)[:-cut])


@given(hnp.arrays(np.int32, st.integers(1, 40)))
def test_arbitrary_numbers_are_rejected_or_add_up(numbers: np.ndarray) -> None:
    try:
        rows = decode_logits_processors(numbers)
    except PlanError:
        return
    assert len(_joined(rows)) == len(numbers)
